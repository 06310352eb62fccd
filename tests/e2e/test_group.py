"""`streamd --group`: users of a group share one daemon, others are none of its clients."""

import grp
import json
import os
import stat

import pytest

GROUP = grp.getgrgid(1)
MEMBER_UID = 65534
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


def read_as(place, gid, model, name):
    """What a reader says that runs as another user of that one group."""
    reader = place.start("reader_of_another_user.py", MEMBER_UID, gid, model, name)
    out, err = reader.communicate(timeout=60)
    return reader.returncode, out, err


@only_root
def test_a_member_reads_what_the_file_holds_and_others_are_kept_out(place, streaming_model):
    place.directory.chmod(0o755)
    daemon = place.daemon(streaming_model, "--group", GROUP.gr_name)
    assert stat.S_IMODE(place.runtime_dir.stat().st_mode) == 0o750
    code, out, err = read_as(place, GROUP.gr_gid, streaming_model, daemon.name)
    assert (code, err) == (0, "")
    counts = json.loads(out)
    assert counts["slabs"] > 0
    assert counts["torn"] == 0
    code, out, err = read_as(place, MEMBER_UID, streaming_model, daemon.name)
    assert (code, out) == (1, "")
    assert "belongs to another user" in err
    assert place.stats(daemon.name)["clients"] == []


@only_root
def test_without_the_option_a_member_is_a_stranger(place, streaming_model):
    place.directory.chmod(0o755)
    daemon = place.daemon(streaming_model)
    os.chown(place.runtime_dir, -1, GROUP.gr_gid)
    place.runtime_dir.chmod(0o750)
    code, _, err = read_as(place, GROUP.gr_gid, streaming_model, daemon.name)
    assert (code, "DaemonLost" in err) == (1, True), err
    assert "Permission denied" in err


def test_a_group_that_cannot_be_served(refusal, place, streaming_model):
    words = ("serve", "--model", streaming_model, "--group")
    assert "no group 'no-such-group'" in refusal("streamd", *words, "no-such-group")
    # Nobody but us may pass the directory above.
    assert "is closed to them" in refusal("streamd", *words, grp.getgrgid(os.getgid()).gr_name)


def test_the_option_is_a_key_of_the_configuration_too(refusal, place, streaming_model, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(f'model = "{streaming_model}"\ngroup = "no-such-group"\n')
    assert "no group 'no-such-group'" in refusal("streamd", "serve", "--config", config)
