"""Several clients of one daemon: one that dies, one that stops, one that goes on undisturbed."""

import json
import select
import signal
import subprocess

import pytest

from infer.config import ModelConfig
from infer.generation.generate import Answer, Conversation
from infer.generation.sampler import Sampler, SamplerConfig
from infer.session import Session
from infer.text.template import ChatTemplate

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did Natalia sell altogether in April and May?"
)
STALL_DEADLINE_MS = 300
READING_S = 1.0
ANSWER_S = 90.0


@pytest.fixture(scope="module")
def expected(module_place, streaming_model) -> str:
    """The whole answer, as the engine gives it alone and undisturbed."""
    with Session(ModelConfig(model=streaming_model, exact=True)) as session:
        template = ChatTemplate.from_metadata(session.index.metadata, session.tokenizer)
        prompt = template.render_to_ids([{"role": "user", "content": QUESTION}])
        conversation = Conversation(session.engine, session.tokenizer)
        sampler, answer = Sampler(SamplerConfig(temperature=0.0)), Answer()
        text = "".join(p.text for p in conversation.answer(prompt, sampler, 0, answer))
    assert answer.token_count > 30, "long enough to be interrupted"
    return text + "\n"


def _start_chat(place, *words: object) -> subprocess.Popen[str]:
    command = ("chat", "--temp", 0, "--exact", "-p", QUESTION)
    return place.start("infer", *command, *words)


def _await_words(*chats: subprocess.Popen[str]) -> list[subprocess.Popen[str]]:
    """Those of `chats` that have begun to answer; at least one."""
    ready, _, _ = select.select([chat.stdout for chat in chats], [], [], ANSWER_S)
    assert ready, "no chat has begun to answer"
    return [chat for chat in chats if chat.stdout in ready]


def _answer_of(chat: subprocess.Popen[str]) -> str:
    out, err = chat.communicate(timeout=ANSWER_S)
    assert chat.returncode == 0, err
    return out


@pytest.mark.slow
def test_one_chat_dies_one_stops_and_one_goes_on(module_place, streaming_model, expected):
    budget = module_place.plan(streaming_model)["full_bytes"] * 2 // 3  # enough for three
    options = ("--host-cache", budget, "--stall-deadline-ms", STALL_DEADLINE_MS)
    daemon = module_place.daemon(streaming_model, *options, "--name", "three")
    dying, stopping, living = chats = [
        _start_chat(module_place, "--model", streaming_model) for _ in range(3)
    ]
    disturbed = {dying: signal.SIGKILL, stopping: signal.SIGSTOP}
    while disturbed:
        for chat in _await_words(*disturbed):
            chat.send_signal(disturbed.pop(chat))
    assert _answer_of(living) == expected
    assert dying.wait() == -signal.SIGKILL
    assert module_place.state_of(stopping.pid) == "T"
    stopping.send_signal(signal.SIGCONT)
    assert _answer_of(stopping) == expected
    module_place.wait_until(
        lambda: module_place.stats(daemon.name)["clients"] == [], "all have left"
    )
    assert all(f"has come (pid {chat.pid})" in daemon.log.read_text() for chat in chats)
    daemon.stop()


def test_nobody_waits_for_a_client_stopped_inside_a_section(module_place, streaming_model):
    floor_bytes = module_place.plan(streaming_model)["floor_bytes"]
    options = ("--host-cache", floor_bytes, "--stall-deadline-ms", STALL_DEADLINE_MS)
    daemon = module_place.daemon(streaming_model, *options, "--name", "stalled")
    words = (streaming_model, daemon.name, "--seconds", READING_S)
    stopped = module_place.start("slab_reader.py", *words, "--stop")
    module_place.wait_until(lambda: module_place.state_of(stopped.pid) == "T", "it stops itself")
    other = module_place.start("slab_reader.py", *words)
    counts = json.loads(other.communicate()[0])
    assert counts["torn"] == 0
    assert counts["sections"] > 10
    assert module_place.stats(daemon.name)["revocations"] == 1
    stopped.send_signal(signal.SIGCONT)
    counts = json.loads(stopped.communicate()[0])
    assert (counts["torn"], counts["slabs"] > 0) == (0, True), "what it had read was read again"
    daemon.stop()


def test_a_client_waits_for_a_daemon_that_loads(module_place, slab_reader, streaming_model):
    daemon = module_place.start_daemon(streaming_model)
    assert "serving" not in daemon.log.read_text()
    reader = slab_reader.SlabReader(streaming_model, daemon.name)
    reader.close()
    daemon.stop()


def test_a_chat_whose_daemon_dies_says_so(module_place, streaming_model):
    floor_bytes = module_place.plan(streaming_model)["floor_bytes"]
    options = ("--host-cache", floor_bytes, "--name", "dying")
    daemon = module_place.daemon(streaming_model, *options)
    chat = _start_chat(module_place, "--name", daemon.name, "--reconnect-s", 0)
    _await_words(chat)
    daemon.process.kill()
    _, err = chat.communicate(timeout=ANSWER_S)
    assert chat.returncode == 1
    assert err.splitlines() == [
        "infer: the daemon 'dying' is gone: it ended",
        "  see its log; start this again, and the daemon too unless it was only reloaded",
    ]
    # The dead daemon's files are in nobody's way.
    assert module_place.run("streamd", "stats", "--name", daemon.name).returncode == 1
    module_place.daemon(streaming_model, *options).stop()
