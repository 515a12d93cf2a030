"""A model in parts, on a group of one process; tests of two are in test_distributed.py."""

import pytest
import torch
import torch.distributed as dist

from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError
from siamesenorm.training import parallel
from siamesenorm.training.build import build_model
from siamesenorm.training.processes import ALONE, Processes, together

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ids():
    return torch.arange(32).reshape(2, 16)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("overrides", [[], ["model.scheme=pre"], ["model.config.tie_word_embeddings=true"]])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_in_parts_computes_what_the_whole_does_and_its_streams_stay_float32(tiny, overrides, precision):
    recipe = tiny(f"train.precision={precision}", *overrides)
    plain = build_model(recipe).eval()
    # A group of one is not shared, so it is cut by hand.
    model = build_model(recipe).eval()
    parallel.shard(model, parallel.mesh_for(recipe, "fsdp", CPU, ALONE), recipe)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"), capture_streams(model) as streams:
        ours = model(input_ids=ids()).logits
        theirs = plain(input_ids=ids()).logits
    assert {stream.dtype for block in streams for stream in block} == {torch.float32}
    # Norm weights of a sharded block are rounded as well, all of which are 1 here.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    whole = parallel.whole_model(model, recipe)
    assert whole is not model
    assert torch.equal(whole(input_ids=ids()).logits, build_model(recipe).eval()(input_ids=ids()).logits)
    tied = recipe.model.config.get("tie_word_embeddings", False)
    assert (whole.lm_head.weight is whole.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    ("overrides", "count", "how"),
    [
        ([], 1, "none"),
        ([], 2, "fsdp"),
        (["train.parallel=hsdp"], 1, "none"),
        (["train.parallel=ddp"], 4, "ddp"),
        (["train.parallel=hsdp", "train.shard_degree=2"], 4, "hsdp"),
    ],
)
def test_how_processes_share_a_model(tiny, overrides, count, how):
    recipe = tiny(*overrides)
    assert parallel.strategy(recipe, count) == how
    parallel.check(recipe, Processes(count=count, local=count))


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        (["train.batch_size=4"], Processes(count=3), r"train.batch_size \(4\) does not divide over 3 processes"),
        (["train.parallel=hsdp", "train.shard_degree=3"], Processes(count=4), r"\(3\) does not divide 4 processes"),
        (["train.parallel=hsdp", "train.batch_size=6"], Processes(count=6, local=4), r"\(4\) does not divide 6"),
    ],
)
def test_what_cannot_be_shared_is_refused(tiny, overrides, processes, message):
    with pytest.raises(ConfigError, match=message):
        parallel.check(tiny(*overrides), processes)


def test_options_that_contradict_each_other_or_do_not_exist(tiny):
    with pytest.raises(ConfigError, match=r"shard_degree belongs to train\.parallel=hsdp"):
        tiny("train.shard_degree=2")
    with pytest.raises(ConfigError, match="did you mean 'fsdp'"):
        tiny("train.parallel=fsdpp")


def test_one_process_alone():
    with together(CPU) as processes:
        assert processes is ALONE
    assert ALONE.is_first
    assert ALONE.first(lambda: 3) == ALONE.first_only(lambda: 3) == 3
    assert ALONE.smallest(4) == 4
    with pytest.raises(ConfigError, match="no"):
        ALONE.first(lambda: (_ for _ in ()).throw(ConfigError("no")))


def test_processes_that_do_not_meet(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "no"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="the processes cannot reach each other"), together(CPU):
        pass
