"""Recipes on the digits that train in seconds: a classifier and a diffusion model."""

from __future__ import annotations

from pathlib import Path

import yaml

_TRAIN = {
    "steps": 7,
    "batch_size": 400,
    "ema_decay": 0.9,
    "validate_every": 3,
    "checkpoint_every": 2,
    "log_every": 2,
    "device": "cpu",
}
_DATA = {"source": "digits", "image_size": 8, "channels": 1, "validation_images": 40}
# An epoch is three steps, so that runs are broken off and taken up in the middle of one.
CLASSIFIER = {
    "name": "tiny-vit",
    "task": "image-classification",
    "model": {
        "host": "vit",
        "scheme": "siamese",
        "options": {"x": "post"},
        "config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "hidden_dropout_prob": 0.1,
            "drop_path_rate": 0.2,
        },
    },
    "data": _DATA,
    "augment": {"shift": 1},
    "loss": {"label_smoothing": 0.1},
    "optim": {"lr": 1e-2},
    "schedule": {"warmup_steps": 2},
    "train": _TRAIN,
}
DENOISER = {
    "name": "tiny-dit",
    "task": "class-conditional-diffusion",
    "model": {
        "host": "dit",
        "scheme": "siamese",
        "options": {"x": "post"},
        "config": {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "patch_size": 4},
    },
    "data": _DATA,
    "diffusion": {"timesteps": 50},
    "optim": {"lr": 1e-2},
    "schedule": {"warmup_steps": 2},
    "train": _TRAIN,
    "sample": {"steps": 4, "guidance": [1.0, 2.0], "per_class": 2},
}


def write_recipes(folder: Path) -> None:
    for tree in (CLASSIFIER, DENOISER):
        (folder / f"{tree['name']}.yaml").write_text(yaml.safe_dump(tree))
