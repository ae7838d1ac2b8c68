"""Several turns: what is asked again is not read again, and an interrupted answer stays in the conversation."""

import pytest

from specjax.drafters import NGram
from specjax.sampling import Sampling
from tests.pretrained.tiny_model import CONTEXT

OPTIONS = dict(max_new_tokens=10, sampling=Sampling.of(0))


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("drafter", [None, NGram(3)])
def test_every_turn_answers_the_whole_conversation(model, drafter):
    chat, messages = model.chat("Be brief.", drafter=drafter, **OPTIONS), [{"role": "system", "content": "Be brief."}]
    for text in ("the cat", "and the dog", "für"):
        messages.append(user(text))
        (expected,) = model.generate([messages], **OPTIONS)
        reply = chat.reply(text)
        assert reply.tokens.tolist() == expected.tokens.tolist()
        assert reply.prompt_tokens == expected.prompt_tokens
        messages.append(answer(reply.text))
        assert chat.messages == messages


def test_later_turns_read_only_what_is_new(model):
    chat = model.chat(**OPTIONS)
    first, second = chat.reply("the cat sat on the mat"), chat.reply("why")
    assert first.reused_tokens == 0
    assert second.reused_tokens >= first.prompt_tokens - 1


def test_a_conversation_goes_on_when_its_buffers_grow(model):
    chat, said = model.chat(**OPTIONS), []
    for _ in range(5):
        said.append(user("the cat sat on the mat and the dog ate"))
        (expected,) = model.generate([said], **OPTIONS)
        reply = chat.reply(said[-1]["content"])
        assert reply.tokens.tolist() == expected.tokens.tolist()
        said.append(answer(reply.text))
    assert expected.prompt_tokens > 64


def test_an_answer_that_was_interrupted_stays_as_far_as_it_came(model):
    chat = model.chat(**OPTIONS)
    stream = chat.stream("the cat")
    shown = next(stream).text
    with pytest.raises(KeyboardInterrupt):
        for piece in stream:
            shown += piece.text
            raise KeyboardInterrupt
    assert chat.messages == [user("the cat"), answer(shown)]
    reply = chat.reply("why")
    (expected,) = model.generate([[user("the cat"), answer(shown), user("why")]], **OPTIONS)
    assert reply.tokens.tolist() == expected.tokens.tolist() and reply.reused_tokens > 0
    assert list(stream) == []  # its cache went on to the next turn
    assert len(chat.messages) == 4


def test_a_turn_that_was_closed_stays_and_the_next_one_reads_everything(model):
    chat = model.chat(**OPTIONS)
    stream = chat.stream("the cat")
    shown = next(stream).text
    stream.close()
    reply = chat.reply("why")
    (expected,) = model.generate([[user("the cat"), answer(shown), user("why")]], **OPTIONS)
    assert reply.tokens.tolist() == expected.tokens.tolist() and reply.reused_tokens == 0
    stream = chat.stream("a")
    next(stream)
    stream.close()
    chat.reset()
    assert chat.messages == []


def test_a_turn_without_a_token_is_forgotten(model):
    chat = model.chat(**OPTIONS)
    chat.stream("the cat")
    assert chat.messages == []
    assert chat.reply("a").text == model.chat(**OPTIONS).reply("a").text


def test_reset_keeps_the_system_message_alone(model):
    chat = model.chat("Be brief.", **OPTIONS)
    first = chat.reply("a")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    again = chat.reply("a")
    assert again.text == first.text and again.reused_tokens > 0


def test_sampled_turns_take_noise_of_their_own(model):
    chat = model.chat(max_new_tokens=8, seed=4)
    replies = []
    for _ in range(2):
        chat.reset()
        replies.append(chat.reply("a").tokens.tolist())
    assert replies[0] != replies[1]
    assert replies[0] == model.generate([[user("a")]], max_new_tokens=8, seed=4)[0].tokens.tolist()


def test_answers_shrink_to_the_context_and_then_the_error_leaves_all_as_it_is(model):
    chat = model.chat(max_new_tokens=200, sampling=Sampling.of(0))
    long = "a " * 60
    for _ in range(8):
        before = chat.messages
        try:
            reply = chat.reply(long)
        except ValueError as error:
            assert f"must stay below the context of {CONTEXT}" in str(error) and "reset" in str(error)
            break
        assert reply.prompt_tokens + len(reply.tokens) <= CONTEXT
    else:
        pytest.fail("the context was never full")
    assert chat.messages == before
    chat.reset()
    assert chat.reply("a").tokens.size


def test_a_limit_below_one_is_an_error(model):
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1; got 0"):
        model.chat(max_new_tokens=0)
