"""``siamesenorm data``."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.cli.options import DEFAULT_RECIPE, Json, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from siamesenorm.data.shards import TokenArrays

app = typer.Typer(name="data", help="Make token arrays and latents to train on.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Make token arrays and latents to train on."""


@app.command("prepare")
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="A text, JSON lines (.gz too), Parquet, CSV or Arrow file, a folder of them, a Hugging Face dataset "
            "saved to disk, or the name of one on the hub."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to make; the same command goes on with an unfinished one.")],
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME_OR_PATH", help="A tokeniser of transformers; default: bytes.")
    ] = None,
    train_bpe: Annotated[
        int | None, typer.Option(metavar="N", help="Learn a byte-level BPE of N tokens from the documents to train on.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="The field or column with the text.")] = "text",
    document_end: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What ends a document in text files: 'file', 'blank-line', or the text between two documents (\\n for "
            "the end of a line). Default: blank-line for a single file, file in a folder.",
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="text, json, parquet or table, where the files' names do not tell.")
    ] = None,
    split: Annotated[str, typer.Option(help="Of a dataset that has several.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Of a dataset on the hub.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a dataset on the hub; default: the newest.")] = None,
    validation_fraction: Annotated[float, typer.Option(help="About this share of the documents is held out.")] = 0.01,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out and count what cannot be read, instead of stopping there.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Which documents are held out.")] = 0,
    shard_tokens: Annotated[int, typer.Option(help="At most this many tokens in one array.")] = 1 << 27,
    json: Json = False,
) -> None:
    """Turn documents into token arrays with a train/validation split that no document crosses."""
    from siamesenorm.data.prepare import Request
    from siamesenorm.data.prepare import prepare as run
    from siamesenorm.data.progress import for_terminal
    from siamesenorm.data.sources import Reading

    end = None if document_end is None else document_end.replace("\\n", "\n").replace("\\t", "\t")
    reading = Reading(text_field, end, format, split, subset, revision)
    request = Request(source, reading, tokenizer, train_bpe, validation_fraction, skip_bad, seed, shard_tokens)
    with _interruptible():
        done = run(request, out, for_terminal())
    if json:
        print_json(done.summary())
    else:
        _report(done.summary(), done.arrays)


@app.command("encode-latents")
def encode_latents(
    source: Annotated[
        str,
        typer.Argument(
            help="'digits', a folder of class folders, Parquet files, a Hugging Face dataset saved to disk, or hf:NAME "
            "for one on the hub."
        ),
    ],
    autoencoder: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="An image autoencoder of diffusers, or a pipeline that has one.")
    ],
    image_size: Annotated[int, typer.Option(help="Pixels of a side of the square that images are made.")],
    out: Annotated[Path, typer.Option(help="The folder to make; the same command goes on with an unfinished one.")],
    batch_size: Annotated[int, typer.Option(help="Images encoded at once.")] = 32,
    device: Annotated[
        str | None, typer.Option(help="Such as cuda:1 or cpu; default: a GPU where there is one.")
    ] = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Encode each image flipped from left to right too, to train on either.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="What latents are stored as: float16 or float32.")] = "float16",
    shard_size: Annotated[int, typer.Option(help="Images in one file.")] = 4096,
    validation_fraction: Annotated[
        float | None,
        typer.Option(help="The share held out where the source has no split of its own; default: 0.1, of digits 0.2."),
    ] = None,
    crop_fraction: Annotated[
        float, typer.Option(help="The share of the short side that the centre crop keeps, such as 0.875.")
    ] = 1.0,
    unreadable: Annotated[
        str, typer.Option(help="skip (leave out and count images that cannot be read) or error (stop at the first).")
    ] = "skip",
    image_column: Annotated[str | None, typer.Option(help="Of a table, where its type does not tell.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Of a table, where its type does not tell.")] = None,
    json: Json = False,
) -> None:
    """Turn labelled images into an autoencoder's latents, ahead of training a diffusion model on them."""
    from siamesenorm.data.encode import Request, encode
    from siamesenorm.data.progress import for_terminal

    request = Request(
        source, autoencoder, image_size, batch_size, device, flip, dtype, shard_size, validation_fraction,
        crop_fraction, unreadable, image_column, label_column,
    )  # fmt: skip
    with _interruptible():
        done = encode(request, out, for_terminal())
    if json:
        print_json(done.summary())
    else:
        _report_latents(done.summary())


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; the same command goes on from what was finished", file=sys.stderr)
        raise typer.Exit(130) from None


def _report_latents(summary: dict[str, Any]) -> None:
    if summary["status"] == "already finished":
        print(f"{summary['out']} has already been encoded with these arguments\n")
    for name in ("train", "validation"):
        part = summary[name]
        print(f"{name:16} {part['images']:,} images, {part['shards']} file{'s' if part['shards'] != 1 else ''}")
    print(f"unreadable       {summary['unreadable']:,}, left out")
    channels, height, width = summary["latent_shape"]
    flipped = ", and of the flipped images" if summary["flip"] else ""
    what = "means and variances" if summary["variational"] else "latents"
    print(f"latents          {what} of {channels} × {height} × {width}, {summary['dtype']}{flipped}")
    print(f"autoencoder      {summary['autoencoder']} ({summary['autoencoder_class']})")
    print(f"size             {summary['bytes']:,} bytes in {summary['out']}")
    print(f"sha256           {summary['sha256']}")


def _report(summary: dict[str, Any], arrays: TokenArrays) -> None:
    if summary["status"] == "already finished":
        print(f"{arrays.folder} has already been prepared with these arguments\n")
    for name in ("train", "validation"):
        part = summary[name]
        shards = f"{part['shards']} array{'s' if part['shards'] != 1 else ''}"
        print(
            f"{name:16} {part['documents']:,} documents, {part['tokens']:,} tokens, {part['bytes']:,} bytes, {shards}"
        )
    print(f"bytes per token  {summary['bytes_per_token']:.3f}")
    reasons = ", ".join(f"{count:,} for {reason}" for reason, count in summary["skipped_reasons"].items())
    why = f" ({reasons})" if reasons else ""
    print(f"left out         {summary['empty']:,} empty, {summary['skipped']:,} skipped{why}")
    print(f"vocabulary       {summary['vocab_size']:,} tokens, kept as {summary['dtype']}")
    print(f"sha256           {summary['sha256']}")
    print(f"\n{_next(arrays)}")


def _next(arrays: TokenArrays) -> str:
    """The command that trains on arrays, with the default recipe; it may ask for more than a small corpus holds out."""
    from siamesenorm.training.recipe_files import load

    asked = load(DEFAULT_RECIPE, []).data
    fits = arrays.validation.sequences(asked.sequence_length)
    if not fits:
        return (
            f"next: what is held out does not make one sequence of {DEFAULT_RECIPE}'s {asked.sequence_length} tokens; "
            "prepare it again with a larger --validation-fraction, or train on shorter sequences"
        )
    fewer = "" if fits >= (asked.validation_sequences or 1) else f" data.validation_sequences={fits}"
    return f"next: siamesenorm train data.source={arrays.folder}{fewer}"
