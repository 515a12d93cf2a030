"""The models by name: whatever is imported first, with timm's arguments, and at no cost to timm."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import timm
import torch
from timm.utils import ParseKwargs

from siamesenorm import hosts
from siamesenorm.residual import ConfigError, make_scheme
from tests.timm.models import SHAPE, images

NAMES = ["siamese_deit_small_patch16_224", "siamese_deit_tiny_patch16_224"]
TINY = NAMES[1]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "import timm, siamesenorm",
        "import siamesenorm\nfrom timm.models.vision_transformer import VisionTransformer\nimport timm",
        "import siamesenorm, importlib.util\nassert importlib.util.find_spec('timm').loader.get_source('timm')\n"
        "from transformers.utils import is_timm_available as there\nassert there()\nimport timm",
    ],
    ids=["timm-first", "a-module-of-timm-first", "looked-for-first"],
)
def test_they_are_there_whatever_is_imported_first(imports):
    code = f"""
{imports}
import sys
assert timm.list_models("siamese*") == {NAMES!r}
assert not [name for name in sys.modules if name.startswith("siamesenorm.hosts")]
print(timm.__spec__.loader.__class__.__name__)
"""
    assert python(code) == "SourceFileLoader"


def test_a_timm_that_fails_to_import_is_told_of_them_when_it_is_there(tmp_path):
    """The finder waits for an import that ends well."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise ImportError('broken')")
    code = f"""
import sys
import siamesenorm, siamesenorm.hosts
assert "timm" not in sys.modules
sys.path.insert(0, {str(tmp_path)!r})
try:
    import timm
except ImportError as error:
    assert "broken" in str(error)
else:
    raise AssertionError
sys.path.pop(0)
import timm
print(len(timm.list_models("siamese*")))
"""
    assert python(code) == "2"


def test_importing_timm_costs_what_it_costs():
    """Registration brings no module but the few it is made of."""
    plain, both = (
        set(python(f"import {names}, sys\nprint(*sys.modules)").split()) for names in ("timm", "siamesenorm, timm")
    )
    assert both - plain == {
        "siamesenorm",
        "siamesenorm.hub",
        "siamesenorm.hub.autoload",
        "siamesenorm.hub.timm_models",
    }


@pytest.mark.parametrize(("name", "width", "heads", "millions"), [(NAMES[0], 384, 6, 22.1), (NAMES[1], 192, 3, 5.7)])
def test_they_are_deit_and_two_norms_more_a_sublayer(name, width, heads, millions):
    with torch.device("meta"):
        model = timm.create_model(name, weight_init="skip")
    plain = sum(
        parameter.numel() for n, parameter in model.named_parameters() if "residual" not in n and "readout" not in n
    )
    assert plain / 1e6 == pytest.approx(millions, abs=0.06)
    assert sum(p.numel() for p in model.parameters()) == plain + (12 * 2 + 1) * 2 * 2 * width
    assert (model.embed_dim, len(model.blocks), model.patch_embed.patch_size) == (width, 12, (16, 16))
    assert model.blocks[0].attn.num_heads == heads
    assert model.pretrained_cfg["architecture"] == name
    assert model.default_cfg["input_size"] == (3, 224, 224)
    assert model.default_cfg["classifier"] == "head"
    assert timm.data.resolve_data_config({}, model=model)["crop_pct"] == 0.9
    assert not timm.models.is_model_pretrained(name)
    assert timm.list_models(module="timm_models") == NAMES


def test_timms_arguments():
    given = {"num_classes": 7, "in_chans": 1, "img_size": 64, "patch_size": 16, "drop_rate": 0.25}
    model = timm.create_model(TINY, pretrained=False, depth=3, drop_path_rate=0.2, **given)
    assert model(images(size=64, channels=1)).shape == (2, 7)
    assert model.head_drop.p == 0.25
    assert [round(block.mlp_residual.drop_path, 6) for block in hosts.blocks(model)] == [0, 0.1, 0.2]
    assert timm.create_model(TINY, num_classes=0, depth=1).forward_features(images(size=224)).shape == (2, 197, 192)


def test_a_scheme_of_your_choice():
    assert hosts.scheme_of(timm.create_model(TINY, **SHAPE)) == make_scheme("siamese")
    model = timm.create_model(TINY, **SHAPE, scheme_options={"x": "hybrid", "first_block_pre": True})
    assert hosts.scheme_of(model) == make_scheme("siamese", x="hybrid", first_block_pre=True)
    assert hasattr(model.blocks[1].attn, "v_norm")
    assert hosts.scheme_of(timm.create_model(TINY, **SHAPE, scheme="mixln")).name == "mixln"
    made = make_scheme("hyper", n=2)
    assert hosts.scheme_of(timm.create_model(TINY, **SHAPE, scheme=made)) == made


def test_a_scheme_from_the_command_line_of_timms_script():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    given = parser.parse_args(["--model-kwargs", "scheme=siamese", "scheme_options={'x': 'hybrid'}"]).model_kwargs
    assert hosts.scheme_of(timm.create_model(TINY, **SHAPE, **given)) == make_scheme("siamese", x="hybrid")


def test_equal_seeds_give_timms_weights():
    drawn = {}
    for name in ("vit_tiny_patch16_224", TINY):
        torch.manual_seed(7)
        drawn[name] = timm.create_model(name, depth=2).state_dict()
    shared = drawn["vit_tiny_patch16_224"]
    assert len(shared) > 30
    assert all(torch.equal(drawn[TINY][n], tensor) for n, tensor in shared.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheme": "siames"}, "unknown scheme 'siames': did you mean 'siamese'?"),
        ({"scheme_options": {"X": "hybrid"}}, "scheme 'siamese' has no option 'X': did you mean 'x'?"),
        ({"scheme_options": {"x": "hybrd"}}, "cannot be 'hybrd': did you mean 'hybrid'?"),
        ({"scheme_options": "hybrid"}, "scheme_options are names and values, such as {'x': 'hybrid'}, not 'hybrid'"),
        ({"scheme": make_scheme("pre"), "scheme_options": {"x": "post"}}, "so it takes no further options"),
        ({"pretrained": True}, "there are no pretrained weights of 'siamese_deit_tiny_patch16_224'"),
        ({"depth": 0}, "without blocks"),
        ({"block_fn": timm.models.vision_transformer.ResPostBlock}, "its block 0 is a ResPostBlock"),
    ],
)
def test_what_can_be_wrong(given, message):
    with pytest.raises(ConfigError) as raised:
        timm.create_model(TINY, **{**SHAPE, **given})
    assert message in str(raised.value)


def test_an_unknown_argument_is_timms_own_error():
    with pytest.raises(TypeError, match="schem_options"):
        timm.create_model(TINY, **SHAPE, schem_options={})


@pytest.mark.parametrize("scheme", [{}, {"scheme": "siamese", "scheme_options": {"x": "hybrid"}}, {"scheme": "mgr"}])
def test_weights_of_your_own_by_file_and_by_folder(tmp_path, scheme):
    torch.manual_seed(1)
    model = timm.create_model(TINY, **SHAPE, **scheme).eval()
    wanted = model(images())
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    overlay = {"file": str(tmp_path / "weights.pth"), "num_classes": SHAPE["num_classes"], "input_size": (3, 32, 32)}
    again = timm.create_model(TINY, pretrained=True, pretrained_cfg_overlay=overlay, **SHAPE, **scheme).eval()
    assert torch.equal(again(images()), wanted)

    again = timm.create_model(TINY, checkpoint_path=str(tmp_path / "weights.pth"), **SHAPE, **scheme).eval()
    assert torch.equal(again(images()), wanted)

    from timm.models import save_for_hf

    folder = tmp_path / "folder"
    save_for_hf(model, str(folder), model_args={**SHAPE, **scheme}, safe_serialization=True)
    assert json.loads((folder / "config.json").read_text())["architecture"] == TINY
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(again(images()), wanted)
