"""The task of predicting the next token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from siamesenorm import hosts, probes
from siamesenorm.data import arrays as token_arrays
from siamesenorm.data import corpus
from siamesenorm.data.shards import TokenArrays
from siamesenorm.residual import ConfigError
from siamesenorm.training import form, pretrained, text
from siamesenorm.training.documents import DocumentMask
from siamesenorm.training.evaluate import (
    IGNORED,
    Evaluation,
    entropy,
    evaluate,
    held_out_sequences,
    summed_loss,
    text_batches,
)
from siamesenorm.training.example import forward_inputs
from siamesenorm.training.limits import check_length, check_vocabulary, positions_of
from siamesenorm.training.processes import ALONE, Processes
from siamesenorm.training.recipe import TextRecipe
from siamesenorm.training.routers import RouterLoss
from siamesenorm.training.settings import autocast_of, autocasting
from siamesenorm.training.tasks.base import Batch, Objective, Task, require_host


@dataclass
class CausalLM(Task[TextRecipe, TokenArrays]):
    """Any causal language model of transformers, on token arrays."""

    loss_label = "loss (nats per token)"

    def build(self, *, needs_data: bool = True) -> PreTrainedModel:
        """The model.

        The vocabulary and the ids of the document end and of padding are the tokeniser's unless the recipe gives them;
        a saved model keeps its own, and what the scheme adds to it starts at the scheme's initial values.
        """
        recipe = self.recipe
        require_host(recipe, "ForCausalLM")
        if recipe.model.pretrained is not None:
            saved = pretrained.text_model(recipe)
            if needs_data:
                saved.check_size(token_arrays.vocabulary(recipe.data.source))
            torch.manual_seed(recipe.seed)
            model: PreTrainedModel = saved.build()
            return model
        if not needs_data and "vocab_size" in recipe.model.config:
            unknown = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
            return self._new({**unknown, **recipe.model.config})
        vocabulary = token_arrays.vocabulary(recipe.data.source)
        config: dict[str, Any] = {
            "vocab_size": vocabulary.size,
            "bos_token_id": None,
            "eos_token_id": vocabulary.eos_id,
            # A model keeps the row of its padding out of training, which must not befall the document end.
            "pad_token_id": None if vocabulary.pad_id == vocabulary.eos_id else vocabulary.pad_id,
            **recipe.model.config,
        }
        if isinstance(config["vocab_size"], int):
            check_vocabulary(config["vocab_size"], vocabulary)
        if config["eos_token_id"] != vocabulary.eos_id:
            raise ConfigError(
                f"model.config.eos_token_id ({config['eos_token_id']}) is not what ends the documents in "
                f"{recipe.data.source} ({vocabulary.eos_id}); leave it out"
            )
        return self._new(config)

    def _new(self, config: dict[str, Any]) -> PreTrainedModel:
        recipe = self.recipe
        for key in ("dtype", "torch_dtype"):
            if key in recipe.model.config:
                raise ConfigError(f"model.config.{key} has no effect: weights are float32; see train.precision")
        torch.manual_seed(recipe.seed)
        return hosts.build(recipe.model.host, config, recipe.model.scheme, dict(recipe.model.options))

    def check(self, model: PreTrainedModel, *, needs_data: bool) -> None:
        """Refuse sequences that are too long, another tokeniser, or documents that the model cannot keep apart."""
        recipe = self.recipe
        if recipe.model.pretrained is not None and needs_data:
            pretrained.text_model(recipe).check_tokenizer(recipe.data.source)
        check_length(model, recipe.data.sequence_length, "data.sequence_length")
        if recipe.data.document_masking:
            # What a mask can be put into does not depend on the token that ends a document.
            DocumentMask(eos_id=0).check(model, recipe.data.sequence_length)

    def load(self, processes: Processes) -> TokenArrays:
        """The token arrays."""
        return processes.first(lambda: token_arrays.prepare(self.recipe.data.source))

    def pinned(self, data: TokenArrays) -> TextRecipe:
        """The recipe with the corpus's place and fingerprint in it."""
        recipe, embedded = self.recipe, data.source == corpus.NAME
        tokenizer = recipe.data.tokenizer_sha256
        if tokenizer is not None and tokenizer != data.tokenizer_sha256:
            raise ConfigError(
                f"the corpus {data.source} is cut by another tokeniser than data.tokenizer_sha256 asks for: by "
                f"{data.tokenizer_sha256[:16]}…, not {tokenizer[:16]}…"
            )
        wanted = recipe.data.sha256
        if wanted is not None and wanted != data.sha256:
            raise ConfigError(
                f"the corpus {data.source} is not the one that data.sha256 asks for: it has {data.sha256[:16]}…, not "
                f"{wanted[:16]}… ({'it differs between Python versions; ' if embedded else ''}data.sha256=null takes "
                "it as it is)"
            )
        sequences = data.train.sequences(recipe.data.sequence_length)
        if sequences < recipe.train.batch_size:
            raise ConfigError(
                f"train.batch_size ({recipe.train.batch_size}) asks for more sequences of "
                f"{recipe.data.sequence_length} tokens than the corpus has ({sequences:,})"
            )
        # Fewer than asked for is an error as well, and found here.
        self._held_out(data)
        found = replace(
            recipe.data,
            source=data.source,
            sha256=data.sha256,
            tokenizer_sha256=tokenizer if embedded else data.tokenizer_sha256,
        )
        return replace(recipe, data=found)

    def _held_out(self, data: TokenArrays) -> Any:
        wanted = self.recipe.data
        return held_out_sequences(data.held_out(), wanted.sequence_length, wanted.validation_sequences)

    def blind_loss(self, data: TokenArrays) -> float:
        """The entropy of the tokens that are predicted, in nats: what their frequencies alone tell of them."""
        return entropy(self._held_out(data)[:, 1:])

    def describe(self, data: TokenArrays) -> str:
        """The corpus."""
        return (
            f"corpus {data.source}, sha256 {data.sha256}: {data.train.documents:,} documents "
            f"({data.train.tokens:,} tokens) to train on, {data.validation.documents:,} held out"
        )

    def objective(self, model: PreTrainedModel, data: TokenArrays, device: torch.device) -> TokenObjective:
        """Cross-entropy over tokens, and the routers' loss over sequences."""
        recipe = self.recipe
        mask = DocumentMask(data.vocabulary.eos_id) if recipe.data.document_masking else None
        routers = RouterLoss.of(model, recipe.train.router_loss)
        return TokenObjective(model, device, autocast_of(recipe), mask, routers)

    def batches(self, data: TokenArrays) -> None:
        """None: the engine reads token arrays itself."""

    def validate(
        self,
        model: PreTrainedModel,
        data: TokenArrays,
        *,
        device: torch.device,
        batch_size: int,
        processes: Processes = ALONE,
    ) -> Evaluation:
        """The loss over held-out sequences."""
        return evaluate(
            model,
            self._held_out(data),
            batch_size=batch_size,
            device=device,
            autocast=autocast_of(self.recipe),
            mask=DocumentMask(data.vocabulary.eos_id) if self.recipe.data.document_masking else None,
            processes=processes,
        )

    def probe_batches(
        self, model: PreTrainedModel, data: TokenArrays, *, device: torch.device, batch_size: int, count: int
    ) -> list[probes.Batch]:
        """Held-out sequences."""
        return text_batches(
            model,
            self._held_out(data),
            batch_size=batch_size,
            count=count,
            device=device,
            autocast=autocast_of(self.recipe),
            mask=DocumentMask(data.vocabulary.eos_id) if self.recipe.data.document_masking else None,
        )

    def save_form(self, model: PreTrainedModel, data: TokenArrays, path: Path) -> None:
        """Configuration and tokeniser."""
        form.save_configuration(model, path)
        data.tokenizer(positions_of(model)).save_pretrained(path)

    def show(
        self, model: PreTrainedModel, data: TokenArrays, folder: Path, note: Callable[[str], None]
    ) -> dict[str, Any]:
        """A sample of text."""
        wanted, tokenizer = self.recipe.sample, data.tokenizer(positions_of(model))
        fitting = text.room(model, tokenizer, wanted.prompt, wanted.tokens)
        if not wanted.prompt or not fitting:
            return {"sample": None}
        seed, temperature = self.recipe.seed, wanted.temperature
        made = text.generate(model, tokenizer, wanted.prompt, tokens=fitting, temperature=temperature, seed=seed)
        return {"sample": made}

    def facts(self, data: TokenArrays, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The corpus, and the loss in bits per byte."""
        bits = None
        if figures.get("val_loss") is not None:
            found = Evaluation(figures["val_loss"], figures["val_tokens"])
            bits = found.bits_per_byte(data.held_out_bytes_per_token)
        return {"bits_per_byte": bits, "corpus": data.source, "corpus_sha256": data.sha256}

    def report(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Loss, perplexity and the corpus."""
        loss = number(summary["val_loss"])
        return [
            ("validation loss", f"{loss} nats per token over {summary['val_tokens'] or 0:,} tokens"),
            ("perplexity", number(summary["val_ppl"])),
            ("bits per byte", number(summary["bits_per_byte"])),
            ("corpus", f"{summary['corpus']}, sha256 {summary['corpus_sha256']}"),
        ]

    def next_command(self, path: Path) -> str:
        """Writing text."""
        return f'siamesenorm generate {path} --prompt "def "'

    def example(self, model: Any, rows: int, device: str) -> tuple[dict[str, Any], int]:
        """Tokens, and a mask."""
        dtype = autocast_of(self.recipe) or torch.float32
        length = self.recipe.data.sequence_length
        inputs, _ = forward_inputs(model, rows, length=length, device=device, dtype=dtype)
        if self.recipe.data.document_masking:
            inputs |= DocumentMask(eos_id=0).inputs(model, inputs["input_ids"])
        return inputs, length

    def example_loss(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """The loss of `example`."""
        logits, ids = model(**inputs).logits, inputs["input_ids"]
        return summed_loss(logits, ids) / ids.numel()


class TokenObjective(Objective):
    """Cross-entropy in nats per token that counts, and for a mixture of experts the routers' loss per sequence.

    No split of the batch, into micro-batches or over processes, changes it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        autocast: torch.dtype | None = None,
        mask: DocumentMask | None = None,
        routers: RouterLoss | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.autocast = autocast
        self.mask = mask
        self.routers = routers
        if routers is not None:
            self.names, self.weights = ("loss", "router_loss"), (1.0, routers.weight)

    def prepare(self, batch: Batch) -> Batch:
        """Labels (batch, seq), aligned to the logits, without the steps from one document to the next."""
        if self.mask is None:
            return batch
        return {**batch, "labels": self.mask.labels(batch["input_ids"], batch["labels"])}

    def counts(self, batch: Batch) -> Tensor:
        """Tokens that count, and sequences."""
        counted = (batch["labels"] != IGNORED).sum()
        return torch.stack([counted, torch.tensor(len(batch["labels"]), device=counted.device)])[: len(self.names)]

    def sums(self, forward: Callable[..., Any], micro_batch: Batch) -> list[Tensor]:
        """Cross-entropy, and the routers' loss where there are some."""
        ids = micro_batch["input_ids"]
        inputs: dict[str, Any] = {"attention_mask": micro_batch.get("attention_mask")}
        if self.mask is not None:
            inputs = self.mask.inputs(self.model, ids)
        listening = contextlib.nullcontext() if self.routers is None else self.routers.listening(self.model)
        with listening, autocasting(self.device.type, self.autocast):
            out = forward(input_ids=ids, use_cache=False, **inputs)
        parts = [summed_loss(out.logits, micro_batch["labels"])]
        if self.routers is not None:
            parts.append(self.routers(out.router_logits, len(ids)))
        return parts


def number(value: Any) -> str:
    """A figure for a person, or that there is none."""
    return "none" if value is None else f"{value:.4f}"
