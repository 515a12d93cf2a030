"""The variational bound that trains the variance of a diffusion model's step back.

Equations (Nichol and Dhariwal, arXiv 2102.09672; the model of DiT, arXiv 2212.09748). With betas β_t, α_t = 1 - β_t and
ᾱ_t their product, x_t = √ᾱ_t x_0 + √(1-ᾱ_t) ε. The true step back is a Gaussian with

    mean      √ᾱ_{t-1} β_t / (1-ᾱ_t) · x_0 + √α_t (1-ᾱ_{t-1}) / (1-ᾱ_t) · x_t
    variance  β̃_t = β_t (1-ᾱ_{t-1}) / (1-ᾱ_t)

and the model's has the same mean at its own guess of x_0, and a variance between the two bounds,
exp(v log β_t + (1-v) log β̃_t), v = (s+1)/2 with s the model's further output. The bound is their KL divergence, and at
t = 0 the likelihood of the data's 256 levels; both in bits per number. β̃_0 is 0, so its logarithm is taken at t = 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Bound:
    """The bound for one noise schedule.

    Args:
        betas: β_t, (timesteps,), float.
    """

    def __init__(self, betas: Tensor) -> None:
        betas = betas.double()
        alphas_bar = (1 - betas).cumprod(0)
        before = torch.cat((alphas_bar.new_ones(1), alphas_bar[:-1]))
        variance = betas * (1 - before) / (1 - alphas_bar)
        self.log_large = betas.log()
        self.log_small = torch.cat((variance[1:2], variance[1:])).log()
        self.of_x0 = before.sqrt() * betas / (1 - alphas_bar)
        self.of_xt = (1 - betas).sqrt() * (1 - before) / (1 - alphas_bar)

    def __call__(self, x0: Tensor, xt: Tensor, t: Tensor, guess: Tensor, sigma: Tensor) -> Tensor:
        """Bits per number of each image, (batch,), in float32.

        The mean takes no gradient, so that it is the variance alone which the bound trains.

        Args:
            x0: the images, (batch, channels, height, width), between -1 and 1.
            xt: the same with the noise of step ``t``.
            t: (batch,), from 0.
            guess: the model's x_0, like ``x0``.
            sigma: its further output s, like ``x0``.
        """
        x0, xt, guess, sigma = x0.float(), xt.float(), guess.detach().float(), sigma.float()
        mean = self._at(self.of_x0, t, x0) * x0 + self._at(self.of_xt, t, x0) * xt
        guessed = self._at(self.of_x0, t, x0) * guess + self._at(self.of_xt, t, x0) * xt
        small, large = self._at(self.log_small, t, x0), self._at(self.log_large, t, x0)
        share = (sigma + 1) / 2
        log_variance = share * large + (1 - share) * small
        apart = divergence(mean, small, guessed, log_variance)
        first = -level_log_likelihood(x0, guessed, 0.5 * log_variance)
        bits = torch.where((t == 0).view(-1, *(1 for _ in x0.shape[1:])), first, apart) / math.log(2)
        return bits.flatten(1).mean(1)

    def _at(self, table: Tensor, t: Tensor, like: Tensor) -> Tensor:
        return table.to(t.device)[t].to(like.dtype).view(-1, *(1 for _ in like.shape[1:]))


def divergence(mean: Tensor, log_variance: Tensor, other_mean: Tensor, other_log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) ‖ N(other_mean, other_variance)) in nats, number by number."""
    apart = (mean - other_mean).square() * torch.exp(-other_log_variance)
    return 0.5 * (other_log_variance - log_variance - 1 + torch.exp(log_variance - other_log_variance) + apart)


def level_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """The log-probability of the one of 256 levels between -1 and 1 that each number of ``x`` is, under a Gaussian.

    The lowest and the highest level take all that lies beyond them.
    """
    inverse = torch.exp(-log_scale)
    above, below = (x - mean + 1 / 255) * inverse, (x - mean - 1 / 255) * inverse
    normal = torch.distributions.Normal(0.0, 1.0, validate_args=False)
    up, down = normal.cdf(above), normal.cdf(below)
    probability = torch.where(x < -0.999, up, torch.where(x > 0.999, 1 - down, up - down))
    return probability.clamp(min=1e-12).log()
