import pytest
from transformers import AutoTokenizer

from siamesenorm.data import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer.build(64)


def test_every_byte_is_its_own_id_and_comes_back():
    everything = bytes(range(256))
    assert byte_tokenizer.encode(everything) == list(range(256))
    assert byte_tokenizer.decode(byte_tokenizer.encode(everything)) == everything
    assert byte_tokenizer.decode([104, byte_tokenizer.EOS_ID, 105, byte_tokenizer.PAD_ID]) == b"hi"


@pytest.mark.parametrize("token", [-1, 258])
def test_an_id_outside_the_vocabulary_is_an_error(token):
    with pytest.raises(ValueError, match=f"token {token} is outside"):
        byte_tokenizer.decode([65, token])


def test_every_id_is_a_byte_to_the_tokeniser_too(tokenizer):
    # The tokeniser speaks strings, so every byte is reached through characters whose UTF-8 form holds it.
    reached = set()
    for code in [*range(0x800), *range(0x800, 0xD800, 7), *range(0xE000, 0x110000, 997), 0x40000, 0x80000, 0xC0000]:
        text = chr(code)
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode()), hex(code)
        reached.update(ids)
    assert reached == set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
    symbols = tokenizer.convert_ids_to_tokens(list(range(256)))
    assert len(set(symbols)) == 256


@pytest.mark.parametrize("text", ["", " ", "  leading\n\ttabs\r\n", "naïve 漢字 🙂", "a , b .", "\x00\x7f"])
def test_text_round_trips_without_a_change(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_utf8_show_as_replacement(tokenizer):
    assert tokenizer.decode([65, 0xFF, 66]) == "A\ufffdB"


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n    return '漢', x  # 🙂\n"
    assert loaded(text)["input_ids"] == list(text.encode())
    assert loaded.decode([*text.encode(), byte_tokenizer.EOS_ID], skip_special_tokens=True) == text
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (256, 257, 258)
    assert loaded.model_max_length == 64
