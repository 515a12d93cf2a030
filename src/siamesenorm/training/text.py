"""Text from a model: one prompt, greedy or sampled."""

from __future__ import annotations

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from siamesenorm.residual import ConfigError, one_line
from siamesenorm.training.limits import positions_of


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    streamer: BaseStreamer | None = None,
) -> str:
    """The prompt and what the model makes of it, until a document ends or `tokens` more are there.

    Args:
        model: put into evaluation mode.
        tokenizer: the model's.
        prompt: at least one token long.
        tokens: how many to add at most.
        temperature: 0 takes the likeliest token each time.
        top_k: sample among this many likeliest tokens; None for all.
        top_p: sample among the likeliest tokens that make up this probability; None for all.
        seed: of the sampling; the generators are left as they were.
        streamer: given the tokens as they come.

    Raises:
        ConfigError: for an empty prompt, or one that leaves no room for `tokens`.
    """
    encoded = _encoded(tokenizer, prompt).to(model.device)
    length = encoded["input_ids"].shape[1]
    if not length:
        raise ConfigError("the prompt is empty; give at least one character")
    positions = positions_of(model)
    if positions is not None and length + tokens > positions:
        raise ConfigError(
            f"a prompt of {length} tokens and {tokens} more exceed the model's {positions} positions; "
            f"at most {max(positions - length, 0)} can be added"
        )
    if tokens == 0:
        return prompt
    sampling = {} if temperature == 0 else {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    model.eval()
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        try:
            # A model's own settings may ask for beams, of which nothing streams.
            out = model.generate(
                **encoded,
                max_new_tokens=tokens,
                do_sample=temperature != 0,
                num_beams=1,
                streamer=streamer,
                **sampling,
            )
        except (ValueError, TypeError, IndexError, ImportError) as error:
            raise ConfigError(f"the model cannot continue the prompt: {one_line(error)}") from error
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def room(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, wanted: int) -> int:
    """How many of the `wanted` tokens fit behind the prompt."""
    positions = positions_of(model)
    if positions is None:
        return wanted
    return max(min(wanted, positions - _encoded(tokenizer, prompt)["input_ids"].shape[1]), 0)


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    # Models are trained on documents without anything in front. What is too long is refused here, in clearer words
    # than the tokeniser's own warning.
    return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False, verbose=False)
