"""diffusers' training loop on its own DiT, rewired: noise by a DDPM scheduler, an average of the weights, a pipeline.

    python examples/diffusers_training.py     (takes the extra "diffusion")

The images are scikit-learn's handwritten digits, 8 x 8 pixels. What differs from the loop in diffusers' documentation
is the call of rewire.
"""

import tempfile

import torch
from accelerate import Accelerator
from diffusers import DDIMScheduler, DDPMScheduler, DiTPipeline, DiTTransformer2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import siamesenorm
from siamesenorm.hub.pixels import PixelAutoencoder

STEPS = 30


def digits():
    """Images (n, 1, 8, 8) between -1 and 1, and their classes (n,)."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    return TensorDataset(images, torch.tensor(found.target))


def main():
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=1,
        out_channels=1,
        num_layers=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    model = siamesenorm.rewire(model, "siamese", x="post")
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=STEPS)
    accelerator = Accelerator(cpu=True)
    batches = DataLoader(digits(), batch_size=64, shuffle=True)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    average = EMAModel(model.parameters(), decay=0.9)
    losses = []
    while len(losses) < STEPS:
        for images, labels in batches:
            noise = torch.randn_like(images)
            timesteps = torch.randint(0, 100, (len(images),))
            noisy = noise_scheduler.add_noise(images, noise, timesteps)
            predicted = model(hidden_states=noisy, timestep=timesteps, class_labels=labels).sample
            loss = functional.mse_loss(predicted, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.step(model.parameters())
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    print(f"squared error {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    average.copy_to(model.parameters())
    pipeline = DiTPipeline(
        accelerator.unwrap_model(model).eval(), PixelAutoencoder(), DDIMScheduler.from_config(noise_scheduler.config)
    )
    with tempfile.TemporaryDirectory() as folder:
        pipeline.save_pretrained(folder)
        pipeline = DiTPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline([3, 7], num_inference_steps=5, generator=torch.manual_seed(0), output_type="np").images
    assert drawn.shape == (2, 8, 8, 1)
    print("saved, loaded, and drawn from: a 3 and a 7 of 8 x 8 pixels")


if __name__ == "__main__":
    main()
