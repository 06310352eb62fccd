"""Several clients of one daemon: one that dies, one that stops, one that goes on undisturbed."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from infer.config import ModelConfig
from infer.generate import Answer, Conversation
from infer.sampler import Sampler, SamplerConfig
from infer.session import Session
from infer.template import ChatTemplate
from shared.runtime_dir import running_daemons

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did Natalia sell altogether in April and May?"
)
STALL_DEADLINE_MS = 300
READING_S = 1.0


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


def _finish(process: subprocess.Popen[str], begun: str) -> str:
    """The whole of a chat's answer, of which `begun` has been read."""
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return begun + out


@pytest.mark.slow
def test_one_chat_dies_one_stops_and_one_goes_on(module_place, streaming_model, expected):
    budget = module_place.plan(streaming_model)["floor_bytes"] * 3 // 2
    options = ("--host-cache", budget, "--stall-deadline-ms", STALL_DEADLINE_MS)
    daemon = module_place.daemon(streaming_model, *options, "--name", "three")
    dying, stopping, living = chats = [
        _start_chat(module_place, "--model", streaming_model) for _ in range(3)
    ]
    begun = [chat.stdout.read(1) for chat in chats]
    assert len(running_daemons()) == 1, "they attached, and started none"
    clients = module_place.stats(daemon.name)["clients"]
    assert {client["pid"] for client in clients} <= {chat.pid for chat in chats}
    stopping.send_signal(signal.SIGSTOP)
    dying.kill()
    assert _finish(living, begun[2]) == expected
    assert dying.wait() == -signal.SIGKILL
    assert module_place.state_of(stopping.pid) == "T"
    stopping.send_signal(signal.SIGCONT)
    assert _finish(stopping, begun[1]) == expected
    assert module_place.stats(daemon.name)["clients"] == []
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
    assert counts["sections"] > 50
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


@pytest.mark.parametrize("attached", [False, True])
def test_no_orphan_is_left_by_a_client_that_is_killed(attached, module_place, demo_model):
    client = module_place.start("infer", "chat", "--model", demo_model, stdin=subprocess.PIPE)
    (daemon,) = module_place.wait_until(running_daemons, "an embedded daemon")
    if attached:
        module_place.wait_until(
            lambda: module_place.stats(daemon.name)["clients"], "the client attaches"
        )
    client.kill()
    module_place.wait_until(lambda: not module_place.state_of(daemon.pid), "the daemon ends")
    assert module_place.leftovers() == []


def test_a_chat_whose_daemon_dies_says_so(module_place, streaming_model):
    floor_bytes = module_place.plan(streaming_model)["floor_bytes"]
    options = ("--host-cache", floor_bytes, "--name", "dying")
    daemon = module_place.daemon(streaming_model, *options)
    chat = _start_chat(module_place, "--name", daemon.name)
    chat.stdout.read(1)
    daemon.process.kill()
    _, err = chat.communicate(timeout=90)
    assert chat.returncode == 1
    assert err.splitlines() == [
        "infer: the daemon 'dying' is gone: it ended",
        "  see its log, start it again, then start this again",
    ]
    # The dead daemon's files are in nobody's way.
    assert module_place.run("streamd", "stats", "--name", daemon.name).returncode == 1
    module_place.daemon(streaming_model, *options).stop()
