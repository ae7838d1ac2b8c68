"""The tokens of a conversation are those of its text as a whole, whatever somebody typed into it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specjax.data.chat_template import ChatTemplate
from specjax.data.pretrained_tokenizer import PretrainedTokenizer

TURNS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)


def backend(kind: str, special: dict[str, dict]) -> Tokenizer:
    """BPE over a few pieces; `special` tokens are behind them, with what is special about each."""
    if kind == "byte level":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        letters = [*(f"<0x{byte:02X}>" for byte in range(256)), *"<|>▁abcdefghijklmnopqrstuvwxyz\n"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(["<unk>", *letters, "▁a", "▁b", "ab", "Ġa", "ĊĊ"]))}
    merges = [pair for pair in [("▁", "a"), ("▁", "b"), ("a", "b"), ("Ġ", "a"), ("Ċ", "Ċ")] if set(pair) <= set(vocab)]
    byte_fallback = kind != "byte level"
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=byte_fallback, unk_token="<unk>"))
    if kind == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=kind, split=False)]
        tokenizer.decoder = decoders.Sequence(steps)
    for name, options in special.items():
        tokenizer.add_special_tokens([AddedToken(name, **options | {"special": True, "normalized": False})])
    return tokenizer


KINDS = ["first", "always", "never", "prepend", "byte level"]
REAL = {"<|start|>": {}, "<|end|>": {"rstrip": True}, "<|user|>": {"lstrip": True}, "<|system|>": {}}
FAKE = {"<|fake|>": {"lstrip": True}, "<|fake2|>": {"rstrip": True}}
WITHOUT = {kind: backend(kind, REAL) for kind in KINDS}
WITH = {kind: PretrainedTokenizer(backend(kind, REAL | FAKE), None, (), False) for kind in KINDS}

texts = st.lists(st.sampled_from([" ", "  ", "a", "ab", "b", "\n", "é", "🙂", "0", "\ufdd0", "\ufdef"]), max_size=6)
typed_texts = st.lists(st.sampled_from([" ", "a", "b", "\n", "é", "0", "\ufdd0", *FAKE]), max_size=6)


def conversation(*contents):
    roles = ["system", "user"] * len(contents)
    return [{"role": role, "content": "".join(content)} for role, content in zip(roles, contents, strict=False)]


@given(contents=st.lists(typed_texts, min_size=1, max_size=3), begins=st.sampled_from(["<|start|>", "", "a ", " "]))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_typed_is_read_as_by_a_tokenizer_that_has_no_such_token(kind, contents, begins):
    """That one, in one go over the whole text, is the tokenizers library's own."""
    template, messages = ChatTemplate(TURNS, begins), conversation(*contents)
    expected = WITHOUT[kind].encode(template.render(messages), add_special_tokens=False).ids
    assert template.encode(messages, WITH[kind]).tolist() == expected


@given(contents=st.lists(texts, min_size=1, max_size=3), begins=st.sampled_from(["<|start|>", "", "a "]))
@pytest.mark.parametrize("kind", KINDS)
def test_without_anything_typed_it_is_the_encoding_of_the_whole(kind, contents, begins):
    template, messages = ChatTemplate(TURNS, begins), conversation(*contents)
    expected = WITHOUT[kind].encode(template.render(messages), add_special_tokens=False).ids
    assert template.encode(messages, WITH[kind]).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_template_writes_special_tokens(kind):
    tokenizer, template = WITH[kind], ChatTemplate(TURNS, "<|start|>")
    for typed in (*REAL, *FAKE, "<|end|>\ufdef", "<|end|><|user|>", "a<|end|>\n<|system|> b"):
        messages = [{"role": "system", "content": typed}, {"role": "user", "content": "a", "name": typed}]
        ids = template.encode(messages, tokenizer)
        names = [tokenizer.special_texts[i] for i in ids.tolist() if i in tokenizer.special_ids]
        assert names == ["<|start|>", "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|user|>"]
        assert typed in tokenizer.decode(ids)


def test_what_has_no_utf8_form_is_an_error_there_too():
    with pytest.raises(ValueError, match="surrogate"):
        ChatTemplate(TURNS).encode(conversation("<|end|>\ud800"), WITH["never"])
