"""The parts of training on images: augmentation, the weights' average, the variational bound, the Fréchet distance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.distributions import Normal, kl_divergence

from siamesenorm.training.augment import flipped, shifted
from siamesenorm.training.average import WeightAverage
from siamesenorm.training.frechet import distance
from siamesenorm.training.normalise import Normalise
from siamesenorm.training.recipe import DiffusionRecipe
from siamesenorm.training.tasks.diffusion import Noise, NoiseObjective
from siamesenorm.training.variational import Bound

CPU = torch.device("cpu")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_shifted_images_are_the_same_elsewhere():
    images = torch.randint(1, 255, (50, 2, 5, 7), generator=seeded(), dtype=torch.uint8)
    moved = shifted(images, 2, seeded(1))
    assert moved.dtype == torch.uint8
    seen = set()
    for before, after in zip(images, moved, strict=True):
        large = torch.nn.functional.pad(before, (2, 2, 2, 2))
        places = [(y, x) for y in range(5) for x in range(5) if torch.equal(large[:, y : y + 5, x : x + 7], after)]
        assert len(places) == 1
        seen |= set(places)
    assert len(seen) > 15
    assert torch.equal(shifted(images, 2, seeded(1)), moved)


def test_half_of_the_images_are_flipped():
    images = torch.rand(400, 1, 3, 4, generator=seeded())
    out = flipped(images, seeded(1))
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(out, images, strict=True)]
    assert all(m or torch.equal(a, b) for m, a, b in zip(mirrored, out, images, strict=True))
    assert 150 < sum(mirrored) < 250


def test_pixels_are_normalised_by_channel():
    images = torch.randint(0, 256, (2, 3, 4, 4), generator=seeded(), dtype=torch.uint8)
    out = Normalise((0.1, 0.2, 0.3), (1.0, 2.0, 4.0))(images)
    for channel, (mean, std) in enumerate([(0.1, 1.0), (0.2, 2.0), (0.3, 4.0)]):
        torch.testing.assert_close(out[:, channel], (images[:, channel] / 255 - mean) / std)


def test_the_average_follows_its_formula():
    model = torch.nn.Linear(3, 2).double()
    average = WeightAverage(model, 0.95)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(1, 200):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=seeded(step), dtype=torch.float64))
        average.update(step)
        decay = min(0.95, (1 + step) / (10 + step))
        expected = {n: decay * expected[n] + (1 - decay) * p.detach() for n, p in model.named_parameters()}
    for name, weight in average.weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-12)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with average.applied():
        assert all(torch.equal(p, average.weights[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
def test_the_bound_is_the_divergence_of_the_true_step_back(schedule):
    """Against the marginals of the chain, by Bayes' rule, in float64."""
    from diffusers import DDPMScheduler

    betas = DDPMScheduler(40, beta_schedule=schedule).betas.double()
    bound = Bound(betas)
    kept = (1 - betas).cumprod(0)
    x0, noise, guess, sigma = (torch.randn(39, 2, 3, 3, generator=seeded(i)).double() for i in range(4))
    x0 = x0.clamp(-0.9, 0.9)
    t = torch.arange(1, 40)
    column = lambda values: values.view(-1, 1, 1, 1)  # noqa: E731
    now, before, beta = column(kept[t]), column(kept[t - 1]), column(betas[t])
    xt = now.sqrt() * x0 + (1 - now).sqrt() * noise

    def back(of):
        # q(x_{t-1} | x_t, x_0) ∝ q(x_t | x_{t-1}) q(x_{t-1} | x_0): precisions add up.
        precision = (1 - beta) / beta + 1 / (1 - before)
        mean = ((1 - beta).sqrt() * xt / beta + before.sqrt() * of / (1 - before)) / precision
        return mean, 1 / precision

    mean, variance = back(x0)
    share = (sigma + 1) / 2
    learned = torch.exp(share * beta.log() + (1 - share) * variance.log())
    expected = kl_divergence(Normal(mean, variance.sqrt()), Normal(back(guess)[0], learned.sqrt()))
    found = bound(x0, xt, t, guess, sigma)
    torch.testing.assert_close(found.double(), expected.flatten(1).mean(1) / math.log(2), rtol=2e-4, atol=1e-5)


def test_the_first_step_is_the_likelihood_of_the_256_levels():
    betas = torch.linspace(1e-4, 0.02, 1000).double()
    bound = Bound(betas)
    levels = (torch.arange(256) / 127.5 - 1).view(1, 1, 16, 16)
    xt = levels + 0.01 * torch.randn(levels.shape, generator=seeded())
    sigma, guess = torch.full_like(levels, 0.3), levels + 0.01 * torch.randn(levels.shape, generator=seeded(1))
    found = bound(levels, xt, torch.tensor([0]), guess, sigma)
    # At the first step the mean is the guess itself.
    low, high = bound.log_small[0], bound.log_large[0]
    scale = torch.exp(0.5 * (0.65 * high + 0.35 * low))
    normal = Normal(guess.double(), scale)
    up, down = normal.cdf(levels.double() + 1 / 255), normal.cdf(levels.double() - 1 / 255)
    probability = up - down
    probability[..., 0, 0], probability[..., -1, -1] = up[..., 0, 0], 1 - down[..., -1, -1]
    expected = -(probability.clamp(min=1e-12).log() / math.log(2)).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)


def test_the_bound_trains_the_variance_alone():
    bound = Bound(torch.linspace(1e-4, 0.02, 100))
    x0, guess, sigma = (torch.randn(4, 1, 2, 2, generator=seeded(i)).requires_grad_() for i in range(3))
    near = (x0.detach() + 0.01 * guess).requires_grad_()
    bound(x0.detach(), x0.detach(), torch.tensor([0, 1, 50, 99]), near, sigma).sum().backward()
    assert guess.grad is None
    assert sigma.grad.abs().min() > 0


def test_the_variance_is_that_of_diffusers():
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(100, variance_type="learned_range")
    bound = Bound(scheduler.betas)
    sigma = torch.linspace(-1, 1, 5)
    for t in (1, 10, 99):
        theirs = scheduler._get_variance(t, predicted_variance=sigma)
        share = (sigma.double() + 1) / 2
        ours = share * bound.log_large[t] + (1 - share) * bound.log_small[t]
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_a_perfect_prediction_has_no_error(prediction):
    noise = Noise(DiffusionRecipe(timesteps=100, prediction=prediction, learned_sigma=True))
    x0 = torch.rand(6, 1, 4, 4, generator=seeded()) * 2 - 1
    drawn = torch.randn(x0.shape, generator=seeded(1))
    t = torch.tensor([0, 3, 20, 50, 80, 99])
    xt = noise.onto(x0, drawn, t)
    kept = noise.scheduler.alphas_cumprod[t].view(-1, 1, 1, 1)
    torch.testing.assert_close(xt, kept.sqrt() * x0 + (1 - kept).sqrt() * drawn)
    target = drawn if prediction == "epsilon" else kept.sqrt() * drawn - (1 - kept).sqrt() * x0
    small = torch.full_like(x0, -1.0)
    error, variational = noise.errors(torch.cat((target, small), 1), x0, xt, drawn, t)
    assert error.abs().max() < 1e-10
    # With the true variance too, both steps back are the same; the first one has the levels' likelihood.
    assert variational[1:].abs().max() < 1e-3
    assert variational[0] < 8


def test_labels_are_dropped_once_for_the_step():
    objective = NoiseObjective(Noise(DiffusionRecipe(label_dropout=0.3)), 10, CPU)
    torch.manual_seed(0)
    images = torch.randint(0, 256, (4000, 1, 2, 2), dtype=torch.uint8)
    made = objective.prepare({"images": images, "labels": torch.randint(0, 10, (4000,))})
    assert 0.25 < (made["labels"] == 10).float().mean() < 0.35
    torch.testing.assert_close(made["x0"], images.float() / 127.5 - 1)
    assert made["t"].min() >= 0
    assert made["t"].max() == 999
    none = NoiseObjective(Noise(DiffusionRecipe(label_dropout=0.0)), 10, CPU)
    assert (none.prepare({"images": images, "labels": torch.full((4000,), 3)})["labels"] == 3).all()


def test_the_distance_of_two_sets():
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(500, 4)), generator.normal(size=(700, 4)) @ generator.normal(size=(4, 4)) + 1
    root = scipy.linalg.sqrtm(np.cov(a, rowvar=False) @ np.cov(b, rowvar=False)).real
    apart = np.square(a.mean(0) - b.mean(0)).sum()
    expected = apart + np.trace(np.cov(a, rowvar=False) + np.cov(b, rowvar=False) - 2 * root)
    assert distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert distance(a, a) == pytest.approx(0, abs=1e-9)
    assert distance(a, a + 3) == pytest.approx(4 * 9, rel=1e-9)
