"""Stop strings against a reference that looks at the bytes after every token, wherever a string ends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.decoding import Origin, StopStrings, generate, stream
from specjax.decoding.prefill import prefill
from specjax.decoding.round import mask_proposal
from specjax.decoding.run import Run, decode
from specjax.decoding.stop_strings import FEWEST_STATES
from specjax.drafters import Independent
from specjax.penalties import Penalties
from specjax.protocol import Proposal
from specjax.sampling import Sampling
from specjax.topology import Topology
from tests.decoding.tiny_pair import PROMPTS, VOCAB
from tests.drafters.families import FAMILIES, make_target

ROWS, LIMIT, BUFFER, SEEDS = 4, 16, 32, [40, 41, 42, 43]


def reference(tokens, strings, token_bytes, at_least=0):
    """(number of tokens, string) at which a text ends, or (all of them, None)."""
    text = b""
    for number, token in enumerate(tokens, start=1):
        begin, text = len(text), text + token_bytes[token]
        if number < at_least:
            continue
        for end in range(begin + 1, len(text) + 1):
            found = [string for string in strings if text[:end].endswith(string.encode())]
            if found:
                return number, max(found, key=lambda string: len(string.encode()))
    return len(tokens), None


ODD_BYTES = [b"", b"\xc3", b"\xa9a", b"\xa9", b"ab" * 9]
byte_strings = st.text("abé", max_size=3).map(str.encode) | st.sampled_from(ODD_BYTES)
vocabularies = st.lists(byte_strings, min_size=VOCAB, max_size=VOCAB)
stop_strings = st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4)
texts_of_ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@given(vocabularies, stop_strings, texts_of_ids)
def test_the_tables_read_any_text(token_bytes, strings, tokens):
    tables = StopStrings(strings, token_bytes).tables(VOCAB)
    _, completed = tables.along(jnp.zeros(1, jnp.int32), jnp.array([tokens]))
    number, string = reference(tokens, strings, token_bytes)
    ended = np.flatnonzero(completed[0])
    assert (ended[0] + 1 if ended.size else len(tokens)) == number
    assert (strings[completed[0, ended[0]] - 1] if ended.size else None) == string


@given(vocabularies, stop_strings, st.lists(st.integers(0, VOCAB - 1), min_size=7, max_size=7), st.data())
def test_the_nodes_of_a_tree_are_read_along_their_paths(token_bytes, strings, tokens, data):
    """Behind two tokens that are committed; as a static topology and as parents that are arrays."""
    tables = StopStrings(strings, token_bytes).tables(VOCAB)
    topology = Topology(tuple(data.draw(st.integers(0, node)) for node in range(5)))
    committed, nodes = jnp.array([tokens[:2]]), jnp.array([tokens[2:]])
    state = tables.along(jnp.zeros(1, jnp.int32), committed)[0][:, -1]
    parents = np.array(topology.parents, np.int32)[None]
    for form in (parents, jnp.array(parents)):
        completed = tables.at_nodes(state, nodes, form, topology.max_depth)
        for node in range(1, 6):
            path = [tokens[1 + i] for i in np.flatnonzero(topology.ancestors[node]) if i]
            along = tables.along(state, jnp.array([path]))[1]
            assert completed[0, node - 1] == along[0, -1]


@functools.cache
def target():
    with jax.enable_x64(True):
        return make_target(VOCAB)


@functools.cache
def drafting(name):
    """Drafters that are mostly right: the target itself, as a chain and in trees with its own best tokens first."""
    with jax.enable_x64(True):
        if name == "target only":
            return {}
        if name == "itself":
            return dict(drafter=Independent(target().config, 3), drafter_params=target().params)
        return dict(zip(("drafter", "drafter_params"), FAMILIES[name](target()), strict=True))


def run(name, **options):
    defaults = dict(max_new_tokens=LIMIT, seed=SEEDS, buffer_length=BUFFER, verifier="coupled")
    return generate(target(), PROMPTS[:ROWS], **defaults | drafting(name) | options)


@functools.cache
def whole():
    return [row.tolist() for row in run("target only").tokens]


NAMES = ["target only", "itself", "independent_tree"]
NAMES += [pytest.param(name, marks=pytest.mark.slow) for name in ("eagle_dynamic", "lookahead", "ngram")]


def random_strings(rng, token_bytes):
    """Pieces of what the tokens spell, so that they occur, and some that do not."""
    text = b"".join(token_bytes[i] for i in rng.integers(0, VOCAB, 8)).decode("utf-8", "ignore") + "bab"
    begins = rng.integers(0, len(text), rng.integers(1, 4))
    return [text[begin : begin + rng.integers(1, 7)] for begin in begins]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_ends_with_the_token_that_completes_a_string(name):
    rng, kinds = np.random.default_rng(7), set()
    for _ in range(30):
        token_bytes = ["".join(rng.choice(list("abcé"), rng.integers(0, 4))).encode() for _ in range(VOCAB - 3)]
        token_bytes += [ODD_BYTES[i] for i in rng.integers(0, len(ODD_BYTES), 3)]
        strings = random_strings(rng, token_bytes)
        result = run(name, stop_strings=StopStrings(strings, token_bytes))
        for row, text in enumerate(whole()):
            number, string = reference(text, strings, token_bytes)
            assert result.tokens[row].tolist() == text[:number]
            assert result.stop_string[row] == string
            assert result.finish[row] == ("length" if string is None else "stop")
            origins = result.origins[row]
            drafted = (origins == Origin.DRAFTED).sum()
            assert drafted == result.counts.accepted[row] == result.counts.acceptances[row].sum()
            assert result.counts.emitted[row] == number == len(result.logprobs[row])
            if string is not None:
                within = len(string.encode()) <= len(token_bytes[text[number - 1]])
                kinds |= {Origin(origins[-1]).name, "inside one token" if within else "across tokens"}
    assert kinds >= {"inside one token", "across tokens", "BONUS"} | ({"DRAFTED"} if name != "target only" else set())


@given(token_bytes=vocabularies, strings=stop_strings)
def test_a_stop_string_waits_for_min_new_tokens(token_bytes, strings):
    at_least = [0, 3, 5, 16]
    penalties = Penalties.of(min_new_tokens=at_least)
    result = run("itself", stop_strings=StopStrings(strings, token_bytes), penalties=penalties)
    for row, text in enumerate(whole()):
        number, string = reference(text, strings, token_bytes, at_least[row])
        assert (result.tokens[row].tolist(), result.stop_string[row]) == (text[:number], string)


LETTERS = [bytes([97 + i]) for i in range(VOCAB)]  # one letter per token


def spelled(tokens):
    return b"".join(LETTERS[token] for token in tokens).decode()


def test_streams_end_alike():
    text = spelled(whole()[1])
    strings = StopStrings(text[4:7], LETTERS)
    options = dict(max_new_tokens=LIMIT, seed=SEEDS, buffer_length=BUFFER, verifier="coupled", stop_strings=strings)
    expected = run("itself", stop_strings=strings)
    assert len(expected.tokens[1]) <= 7 and expected.stop_string[1] == text[4:7]
    pieces = list(stream(target(), PROMPTS[:ROWS], **options, **drafting("itself")))
    for row in range(ROWS):
        joined = np.concatenate([piece[row] for piece, _ in pieces])
        assert joined.tolist() == expected.tokens[row].tolist()
    assert pieces[-1][1].stop_string == expected.stop_string
    assert pieces[0][1].finish[1] == "running" and pieces[0][1].stop_string[1] is None


def test_the_prompt_does_not_count():
    text, last = spelled(whole()[1]), spelled(PROMPTS[1][-1:])
    at_the_seam = last + text[0]
    result = run("itself", stop_strings=StopStrings([at_the_seam, last + text], LETTERS))
    assert (at_the_seam in text) == (result.stop_string[1] == at_the_seam)


def test_the_first_end_wins_and_then_the_longest():
    """Within one token and across several, whatever the order in which the strings are given."""
    strings = ["cd", "bcd", "abcde", "bcdx"]
    for given_as in (strings, strings[::-1]):
        for words in ([b"abcdef"], [b"ab", b"cdef"], LETTERS[:6]):
            tables = StopStrings(given_as, words).tables(len(words))
            completed = tables.along(jnp.zeros(1, jnp.int32), jnp.arange(len(words))[None])[1][0].tolist()
            assert given_as[next(filter(None, completed)) - 1] == "bcd"


def test_a_character_may_be_completed_by_the_token_that_ends_the_row():
    first, second = whole()[2][:2]
    token_bytes = [b"."] * VOCAB
    token_bytes[first], token_bytes[second] = "é".encode()[:1], "é".encode()[1:] + b"x"
    if first != second:
        result = run("itself", stop_strings=StopStrings("é", token_bytes))
        assert (result.tokens[2].tolist(), result.stop_string[2]) == ([first, second], "é")


def test_nodes_behind_a_completed_string_are_invalid():
    call = Run.start(target(), PROMPTS[:1], max_new_tokens=9, buffer_length=BUFFER, sampling=Sampling.of(0.0),
                     stop_strings=StopStrings("bc", LETTERS), **drafting("itself"))  # fmt: skip
    tokens = jnp.array([[1, 2, 2]])
    proposal = Proposal(tokens, None, jnp.ones((1, 3), bool), Topology.chain(3))
    assert mask_proposal(proposal, call.state, call.inputs).valid.tolist() == [[True, True, False]]
    proposal = proposal.replace(tokens=jnp.array([[2, 1, 1]]))
    assert mask_proposal(proposal, call.state, call.inputs).valid.tolist() == [[True, True, True]]


def test_other_strings_do_not_retrace_and_none_cost_nothing():
    run("itself", stop_strings=StopStrings("abc", LETTERS))
    before = prefill._cache_size(), decode._cache_size()
    for strings in ("x", ["bd", "ca", "hhhhhhhh"], ["b" * (FEWEST_STATES - 1)]):
        run("itself", stop_strings=StopStrings(strings, LETTERS))
    assert (prefill._cache_size(), decode._cache_size()) == before
    plain = Run.start(target(), PROMPTS[:1], max_new_tokens=4, buffer_length=BUFFER)
    assert plain.state.stop is None and plain.inputs.stop_tables is None
    assert plain.result().stop_string == [None]


def test_ids_behind_the_tokenizers_stand_for_nothing():
    tables = StopStrings("ab", [b"a", b"b"]).tables(4)
    states, completed = tables.along(jnp.zeros(1, jnp.int32), jnp.array([[0, 3, 2, 1]]))
    assert completed.tolist() == [[0, 0, 0, 1]] and states[0, 0] == states[0, 2] != 0


def test_tokens_without_text_behind_the_models_own_do_no_harm():
    strings = StopStrings("ab", [b"a", b"", b"b", b"", b""])
    tokens = jnp.array([[0, 1, 2]])
    for size in (3, 4, 5, 7):
        tables = strings.tables(size)
        assert tables.next_state.shape[1] == tables.completed.shape[1] == size
        assert tables.along(jnp.zeros(1, jnp.int32), tokens)[1].tolist() == [[0, 0, 1]]
    with pytest.raises(ValueError, match=r"a vocabulary of 3 tokens and the target's has 2; .*token_bytes\[:2\]"):
        strings.tables(2)


def test_a_large_vocabulary():
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 105, rng.integers(1, 9)).astype(np.uint8)) for _ in range(3000)]
    strings = ["".join(chr(c) for c in rng.integers(97, 105, n)) for n in (50, 50, 3, 1)]
    tables = StopStrings(strings, words).tables(3000)
    tokens = rng.integers(0, 3000, 60).tolist()
    completed = np.asarray(tables.along(jnp.zeros(1, jnp.int32), jnp.array([tokens]))[1][0])
    number, string = reference(tokens, strings, words)
    assert np.flatnonzero(completed)[0] + 1 == number and strings[completed[number - 1] - 1] == string


BAD = [
    (dict(strings=[]), "stop strings must be 1 to 255 of them; got 0"),
    (dict(strings=["a"] * 256), "stop strings must be 1 to 255 of them; got 256"),
    (dict(strings=""), "a stop string must be a string of at least one character; got ''"),
    (dict(strings=[b"a"]), "a stop string must be a string of at least one character; got b'a'"),
    (dict(strings=["\ud800"]), "has no UTF-8 form"),
    (dict(token_bytes=["a"] * VOCAB), "token_bytes must hold the bytes of every token"),
    (dict(strings=["ab" * 20_000]), "stop strings of 40000 bytes in all need tables of .* MiB for a vocabulary of 11"),
]


@pytest.mark.parametrize("change, message", BAD, ids=range(len(BAD)))
def test_bad_strings(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        StopStrings(**(dict(strings="a", token_bytes=LETTERS) | change))
    assert "\n" not in str(caught.value)


def test_bad_calls():
    with pytest.raises(ValueError, match="stop_strings must be a StopStrings, such as .*; got 'x'"):
        Run.start(target(), [[1]], max_new_tokens=2, stop_strings="x")
    with pytest.raises(ValueError, match="made for a vocabulary of 12 tokens and the target's has 11"):
        Run.start(target(), [[1]], max_new_tokens=2, stop_strings=StopStrings("a", [b"a"] * 12))
