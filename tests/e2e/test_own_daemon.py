"""A daemon that a chat has started for itself shares its terminal, and nothing else."""

from shared.runtime_dir import running_daemons

# At the floor of the cache a prompt takes seconds.
DRIVE = ("--io", "paced:3MB/s")


def test_ctrl_c_leaves_it_alone(module_place, demo_model, open_terminal):
    floor_bytes = module_place.plan(demo_model)["floor_bytes"]
    words = ("--temp", 0, "--kv-sessions", "off", "--host-cache", floor_bytes, *DRIVE)
    terminal = open_terminal("--model", demo_model, *words)
    (record,) = running_daemons()
    terminal.read_until(r"\n>")
    terminal.enter(" ".join(f"the river {name} rises in the hills." for name in range(40)))
    terminal.read_until(r"\d+ of \d+ prompt tokens")
    terminal.type("\x03")
    terminal.read_until(r"\(stopped\)")
    assert running_daemons() == [record]
    terminal.enter("Which is the largest planet in the solar system?")
    terminal.read_until(r"Jupiter\.")
    terminal.enter("/exit")
    assert terminal.process.wait(60) == 0
    module_place.wait_until(lambda: not module_place.state_of(record.pid), "it ends with its chat")
