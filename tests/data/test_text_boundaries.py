"""Beginnings and ends of texts, from whichever file names them."""


import pytest
from tokenizers import Tokenizer, models, processors

from specjax.data.pretrained_tokenizer import PretrainedTokenizer, load_pretrained_tokenizer
from specjax.data.text_boundaries import added_beginning
from tests.data.tiny_vocabularies import SPECIAL, byte_level, folder_of, gguf_of, sentencepiece


def renamed(*names):
    """The special tokens 0, 1, 2 under other names."""
    text = byte_level("smollm").to_str()
    for old, new in zip(SPECIAL, names, strict=True):
        text = text.replace(old, new)
    return Tokenizer.from_str(text)


def adding(single):
    backend = byte_level("smollm")
    tokens = [(name, i) for i, name in enumerate(SPECIAL)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return backend


@pytest.mark.parametrize(
    "single, beginning",
    [("<|start|> $A", 0), ("<|turn|> $A <|end|>", 2), ("$A <|end|>", None), ("$A", None), ("<|turn|> <|start|> $A", 2)],
)
def test_the_beginning_that_a_tokenizer_adds_itself(tmp_path, single, beginning):
    """Whether or not tokenizer_config.json is there, and names other things; an end alone is no beginning."""
    backend = adding(single)
    for number, settings in enumerate([{}, {"bos_token": None}, {"eos_token": "<|end|>"}]):
        tokenizer = load_pretrained_tokenizer(folder_of(tmp_path / str(number), backend, tokenizer_config=settings))
        assert (tokenizer.bos_id, tokenizer.add_bos) == (beginning, beginning is not None)
    assert load_pretrained_tokenizer(folder_of(tmp_path / "alone", backend)).bos_id == beginning
    silent = folder_of(tmp_path / "silent", backend, tokenizer_config={"add_bos_token": False})
    assert not load_pretrained_tokenizer(silent).add_bos


def test_padding_and_texts_of_nothing_are_no_beginning():
    backend = adding("$A <|end|>")
    backend.enable_padding(direction="left", length=8, pad_id=2, pad_token="<|turn|>")
    assert added_beginning(backend) is None
    nothing = Tokenizer(models.BPE())
    nothing.add_special_tokens(["</s>"])
    nothing.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    assert added_beginning(nothing) is None


@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_a_beginning_that_only_a_config_names_is_known_and_not_added(tmp_path, name):
    tokenizer = load_pretrained_tokenizer(folder_of(tmp_path, byte_level("smollm"), **{name: {"bos_token_id": 2}}))
    assert (tokenizer.bos_id, tokenizer.add_bos) == (2, False)
    for wrong in (10**6, -1, True, "0", [0], None):
        folder_of(tmp_path, byte_level("smollm"), **{name: {"bos_token_id": wrong}})
        assert load_pretrained_tokenizer(tmp_path).bos_id is None


def test_what_the_tokenizer_config_names_comes_first(tmp_path):
    backend = adding("<|turn|> $A")
    configs = dict(tokenizer_config={"bos_token": "<|start|>"}, config={"bos_token_id": 1})
    tokenizer = load_pretrained_tokenizer(folder_of(tmp_path, backend, **configs))
    assert (tokenizer.bos_id, tokenizer.add_bos) == (0, False)


@pytest.mark.parametrize(
    "named",
    [
        dict(tokenizer_config={"eos_token": "<|endoftext|>"}),
        dict(generation_config={"eos_token_id": 1}),
        dict(config={"eos_token_id": [1]}),
    ],
    ids=lambda named: next(iter(named)),
)
def test_a_folder_that_names_an_end_has_no_other(tmp_path, named):
    """A base model with the vocabulary of the chat model: its text must not change."""
    tokenizer = load_pretrained_tokenizer(folder_of(tmp_path, renamed("<s>", "<|endoftext|>", "<|im_end|>"), **named))
    assert tokenizer.eos_ids == (1,)


def test_a_folder_that_names_no_end_has_those_of_well_known_names(tmp_path):
    backend = renamed("<|im_end|>", "<|endoftext|>", "<|im_start|>")
    for configs in ({}, dict(config={"eos_token_id": None}, generation_config={"eos_token_id": ["1", -1, True]})):
        tokenizer = load_pretrained_tokenizer(folder_of(tmp_path, backend, **configs))
        assert tokenizer.eos_ids == (1, 0) and tokenizer.end_of_text == 1


def test_ends_come_from_all_configs(tmp_path):
    configs = dict(tokenizer_config={"eos_token": "<|turn|>"}, generation_config={"eos_token_id": [1, 2]})
    folder = folder_of(tmp_path, byte_level("smollm"), **configs, config={"eos_token_id": 0})
    assert load_pretrained_tokenizer(folder).eos_ids == (2, 1, 0)


TURN_ENDS = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|endoftext|>", "</s>"]


@pytest.mark.parametrize("name", TURN_ENDS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_end_of_a_turn_in_a_gguf_file_that_does_not_name_it(kind, name):
    """Only where it is a special token there; else it is text like any other."""
    metadata = gguf_of(renamed("<s>", "<|eos|>", name), "smollm") if kind == "gpt2" else sentencepiece(True)
    metadata.pop("tokenizer.ggml.eot_token_id", None)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    place = tokens.index(name) if name in tokens else len(tokens) - 1
    eos = metadata["tokenizer.ggml.eos_token_id"]
    for type_, ends in ((3, [place]), (4, []), (1, [])):
        if place == eos:
            continue
        changed = metadata | {"tokenizer.ggml.tokens": [*tokens[:place], name, *tokens[place + 1 :]]}
        changed["tokenizer.ggml.token_type"] = [*types[:place], type_, *types[place + 1 :]]
        assert PretrainedTokenizer.from_gguf(changed).eos_ids == (eos, *ends)


def test_a_gguf_file_that_names_the_end_of_a_turn_has_no_other():
    metadata = gguf_of(renamed("<|im_end|>", "<|eos|>", "<|eot_id|>"), "smollm")
    metadata["tokenizer.ggml.token_type"][:3] = [3, 3, 3]
    assert PretrainedTokenizer.from_gguf(metadata).eos_ids == (1, 2)
    del metadata["tokenizer.ggml.eot_token_id"]
    assert PretrainedTokenizer.from_gguf(metadata).eos_ids == (1, 0, 2)
    metadata["tokenizer.ggml.eos_token_id"] = 0  # itself the end of a turn, as in SmolLM2's files
    assert PretrainedTokenizer.from_gguf(metadata).eos_ids == (0,)


def test_damaged_configs_are_named(tmp_path):
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        folder = folder_of(tmp_path / name.removesuffix(".json"), byte_level("gpt-2"))
        for content, message in ((b"{", "is not JSON"), (b"\xff", "is not UTF-8")):
            (folder / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"{folder / name} {message}") as error:
                load_pretrained_tokenizer(folder)
            assert "\n" not in str(error.value)
