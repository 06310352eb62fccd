"""`streamd plan` of whole files: this machine, described machines, headers alone."""

import json
import mmap
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from gguf_factory import hy3_model
from gguf_layout import TensorPlan, write_header_only

from shared.client_memory import client_bytes
from shared.daemon_memory import process_bytes
from shared.errors import ConfigError, GpuError, GpuNotShared, PlanError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.gpu_plan import CLIENT_CONTEXT_BYTES, DAEMON_CONTEXT_BYTES
from shared.io_choice import Rate
from shared.sizes import parse_size
from streamd.commands.io_best import IoBest, reads_of, save_best
from streamd.config import StreamdConfig
from streamd.planning import model_plan
from streamd.planning.model_plan import SYSTEM_BYTES, plan_model
from streamd.planning.plan import AUTO_SHARE
from streamd.planning.plan_options import MachineOptions
from streamd.planning.plan_view import plan_values, render_plan

GB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The header of a model that is larger than this machine."""
    pattern = hy3_model(n_layers=2, n_experts=32, top_k=2)
    sizes = {"width": 1024, "expert_width": 2048}
    plans = []
    for layer in range(1, 41):
        for name, tensor in pattern.tensors.items():
            if not name.startswith("blk.1."):
                continue
            shape = tensor.shape
            if "_exps" in name:
                pair = (sizes["width"], sizes["expert_width"])
                shape = (*(pair[::-1] if "down" in name else pair), 32)
            plans.append(TensorPlan(name.replace("blk.1.", f"blk.{layer}."), shape, tensor.type_id))
    for name, tensor in pattern.tensors.items():
        if not name.startswith("blk.1."):
            plans.append(TensorPlan(name, tensor.shape, tensor.type_id))
    path = tmp_path_factory.mktemp("plan") / "big.gguf"
    metadata = {"general.architecture": pattern.architecture, **pattern.metadata}
    write_header_only(path, metadata | {"hy_v3.block_count": 41}, plans)
    return path


@pytest.fixture
def described(monkeypatch, model):
    """A plan for a machine that is not this one."""
    monkeypatch.setattr(model_plan, "load_best", lambda *_: pytest.fail("of this machine"))

    def plan(ram=4 * GB, vram=3 * GB, rates=(5e9, 13e9, 288e9), **options):
        machine = MachineOptions(
            ram=ram, disk=Rate(rates[0]), pcie=Rate(rates[1]), bandwidth=Rate(rates[2])
        )
        return plan_model(StreamdConfig(model=model, vram=vram, **options), machine)

    return plan


def test_a_described_machine_is_not_exceeded(described):
    plan = described()
    values = plan_values(plan)
    room_bytes = 4 * GB - SYSTEM_BYTES
    assert values["available_bytes"] == room_bytes + values["process_bytes"]
    assert values["floor_bytes"] <= values["host_bytes"]
    assert values["host_bytes"] + values["host_resident_bytes"] <= room_bytes
    gpu = values["gpu"]
    taken = ("slots_bytes", "resident_bytes", "reserve_bytes")
    contexts_bytes = DAEMON_CONTEXT_BYTES + CLIENT_CONTEXT_BYTES
    total_bytes = sum(gpu[name] for name in taken) + contexts_bytes
    assert total_bytes <= 3 * GB
    assert gpu["slots_bytes"] >= gpu["floor_bytes"]


def test_the_client_has_what_its_context_and_chunk_take(described, model):
    index = GgufIndex.open(model, partial=True)
    for options in ({}, {"ctx": 1000}, {"ctx": 1000, "chunk": 100}):
        gpu = plan_values(described(**options))["gpu"]
        wanted = client_bytes(index, options.get("ctx", 0), options.get("chunk"))
        assert gpu["reserve_bytes"] == wanted
    assert plan_values(described(gpu_reserve=5 << 20))["gpu"]["reserve_bytes"] == 5 << 20


def test_the_daemons_process_counts_by_its_gpu_and_its_experts(described, model, monkeypatch):
    plan = described()
    count = plan.experts.expert_count
    assert plan_values(plan)["process_bytes"] == process_bytes(True, count)
    assert (
        process_bytes(True, 10 * count) > process_bytes(True, count) > process_bytes(False, count)
    )
    assert re.search(r"the daemon +13\d MB", render_plan(plan))
    available_bytes = 2 * GB
    monkeypatch.setattr(model_plan, "available_memory_bytes", lambda: available_bytes)
    config = StreamdConfig(model=model, device="cpu")
    values = plan_values(plan_model(config, MachineOptions(disk=Rate(5e9))))
    own_bytes = process_bytes(False, count)
    assert values["process_bytes"] == own_bytes
    left_bytes = available_bytes - own_bytes - values["host_resident_bytes"]
    assert values["budget_bytes"] == int(AUTO_SHARE * left_bytes)


def test_slots_get_the_memory_of_tensors_that_the_gpu_alone_has(described):
    shared, alone = (plan_values(described(cpu_clients=keep)) for keep in (True, False))
    assert shared["resident_bytes"] == alone["resident_bytes"] == shared["host_resident_bytes"]
    assert alone["host_resident_bytes"] == 0
    gained_bytes = alone["host_bytes"] - shared["host_bytes"]
    slot_bytes = shared["host_bytes"] / shared["slots"]
    assert gained_bytes == pytest.approx(AUTO_SHARE * shared["resident_bytes"], abs=2 * slot_bytes)
    assert "in GPU memory alone" in render_plan(described(cpu_clients=False))
    assert "in GPU memory alone" not in render_plan(described())


def test_streamed_layers_stay_in_ram(described):
    for wanted in (None, 0):
        values = plan_values(described(gpu_resident=wanted, cpu_clients=False))
        streamed_bytes = values["gpu"]["streamed_bytes"]
        assert (streamed_bytes > 0) == (wanted == 0)
        assert streamed_bytes <= values["host_resident_bytes"] <= 1.3 * streamed_bytes


def test_more_memory_is_never_slower(described):
    rates = [
        plan_values(described(ram=ram, vram=2 * GB))["forecast"]["tokens_per_s"]["disk"]
        for ram in (5 * GB // 2, 3 * GB, 4 * GB)
    ]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_the_bound_is_of_its_slowest_part(described):
    forecast = plan_values(described(rates=(1e9, 2e9, 1e12)))["forecast"]
    by_hand = {
        "disk": 1e9 / forecast["disk_bytes_a_token"],
        "pcie": 2e9 / forecast["pcie_bytes_a_token"],
        "compute": 1e12 / forecast["compute_bytes_a_token"],
    }
    assert forecast["tokens_per_s"] == pytest.approx(by_hand, rel=1e-2)
    assert forecast["limit"] == min(by_hand, key=by_hand.get)


def test_streamed_layers_cost_their_bytes_of_every_token(described):
    """Little of this model is resident: a layer more or less changes few slots."""
    plans = [described(gpu_resident=wanted) for wanted in (None, 0)]
    some, none = (plan_values(plan) for plan in plans)
    assert some["gpu"]["streamed_layers"] == []
    assert none["gpu"]["streamed_layers"] == list(range(1, 41)), "layer 0 is dense"
    streamed_bytes = none["gpu"]["streamed_bytes"]
    assert none["gpu"]["buffers_bytes"] == 2 * streamed_bytes // 40
    left_bytes = some["gpu"]["resident_bytes"] - none["gpu"]["resident_bytes"]
    assert abs(left_bytes - streamed_bytes) <= 2 << 20, "but for whole granules"
    moved = [plan_values(plan)["forecast"]["pcie_bytes_a_token"] for plan in plans]
    assert moved[1] == pytest.approx(
        plans[1].misses.gpu * plans[1].token_bytes + streamed_bytes, abs=1
    )
    assert moved[1] > moved[0]
    assert "those of 40 layers are streamed" in render_plan(plans[1])
    assert "streamed" not in render_plan(plans[0])


def test_a_card_that_is_too_small_is_said_to_be(described):
    plan = described(vram=1 * GB)
    values = plan_values(plan)
    assert values["gpu"] is None
    assert "this model needs at least" in values["gpu_refusal"]
    assert values["gpu_refusal"] in render_plan(plan)
    assert values["forecast"]["pcie_bytes_a_token"] == 0


def test_programs_get_json_and_people_sentences(described):
    plan = described()
    assert json.loads(json.dumps(plan_values(plan))) == plan_values(plan)
    text = render_plan(plan)
    assert "tokens/s, by" in text
    assert re.search(r"from recorded routing of (gpt-oss-20b|qwen3-30b-a3b)\n", text)
    assert "_" not in text.split("\n", 1)[1].replace(plan.misses.source, ""), "no field names"


def test_what_is_not_known_is_said(model, monkeypatch):
    monkeypatch.setattr(model_plan, "load_best", lambda *_: None)
    plan = plan_model(StreamdConfig(model=model, device="cpu"), MachineOptions(ram=4 * GB))
    assert plan_values(plan)["forecast"]["tokens_per_s"] == {}
    assert "streamd bench-io" in render_plan(plan)


@pytest.mark.parametrize("ram", [None, 4 * GB])
def test_the_disk_is_this_machines_as_measured_unless_it_is_described(model, monkeypatch, ram):
    monkeypatch.setattr(model_plan, "load_best", lambda *_: IoBest("pread", 8, 2000.0))
    monkeypatch.setattr(model_plan, "available_memory_bytes", lambda: 2 * GB)
    plan = plan_model(StreamdConfig(model=model, device="cpu"), MachineOptions(ram=ram))
    assert plan.rates.disk == 2e9
    assert "tokens/s as bench-io measured it here" in render_plan(plan)
    machine = MachineOptions(ram=ram, disk=Rate(5e9))
    plan = plan_model(StreamdConfig(model=model, device="cpu"), machine)
    assert plan.rates.disk == 5e9
    assert "bench-io" not in render_plan(plan)


def test_a_measurement_of_other_slabs_on_this_drive_does_not_count(model, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    experts = ExpertIndex.from_gguf(GgufIndex.open(model, partial=True))
    tiny = replace(experts, classes=[replace(experts.classes[0], part_bytes=(4096, 4096, 4096))])

    def measured() -> float | None:
        machine = MachineOptions(ram=4 * GB)
        return plan_model(StreamdConfig(model=model, device="cpu"), machine).rates.disk

    save_best(reads_of(model, tiny), IoBest("pread", 8, 872.0))
    assert measured() is None
    save_best(reads_of(model, experts), IoBest("pread", 8, 2688.0))
    assert measured() == 2688e6


def test_what_moves_nothing_has_no_bound_and_asks_for_no_rate(described):
    plan = described(ram=64 * GB, vram=64 * GB)
    assert plan_values(plan)["forecast"]["tokens_per_s"].keys() == {"compute"}
    text = render_plan(plan)
    assert re.search(r"the disk +nothing to read\n", text)
    assert re.search(r"PCIe +nothing to copy\n", text)
    assert "rate unknown" not in text


def least_ram(error: PlanError) -> int:
    return parse_size(re.search(r"--ram (\d+MB) or more", error.remedy)[1])


@pytest.mark.parametrize(
    "options", [{}, {"host_cache": 200 << 20}, {"vram": None, "device": "cpu"}]
)
def test_ram_that_is_too_little_is_told_with_the_least_that_will_do(described, options):
    with pytest.raises(PlanError, match="the system and the processes 2,147 MB") as refused:
        described(ram=1500 << 20, **options)
    assert "--host-cache" not in refused.value.remedy, "no cache fits what is left"
    least = least_ram(refused.value)
    described(ram=least, **options)
    with pytest.raises(PlanError, match="is less than"):
        described(ram=least - 10**6, **options)


def test_a_host_cache_that_does_not_fit_the_described_ram(described):
    with pytest.raises(PlanError, match="--host-cache") as refused:
        described(ram=3 * GB, host_cache=2 * GB)
    fitting = parse_size(re.search(r"or --host-cache (\d+MB)", refused.value.remedy)[1])
    assert plan_values(described(ram=3 * GB, host_cache=fitting))["budget_bytes"] == fitting
    described(ram=least_ram(refused.value), host_cache=2 * GB)
    with pytest.raises(PlanError, match=r"a host cache of 1\.0 MB cannot hold"):
        described(ram=3 * GB, host_cache=1 << 20)


def test_a_limit_on_pinned_memory_is_said(model, monkeypatch):
    monkeypatch.setattr(model_plan, "available_memory_bytes", lambda: 2 * GB)
    monkeypatch.setattr(model_plan.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(model_plan.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    plan = plan_model(StreamdConfig(model=model, device="cpu"), MachineOptions())
    assert plan_values(plan)["pinnable_bytes"] == 8 << 20
    assert "ulimit -l" in render_plan(plan)
    monkeypatch.setattr(model_plan.os, "geteuid", lambda: 0)
    plan = plan_model(StreamdConfig(model=model, device="cpu"), MachineOptions())
    assert plan_values(plan)["pinnable_bytes"] is None


def test_a_trace_of_another_model_is_refused(described, tmp_path):
    header = {"n_layers": 2, "n_experts": 4, "top_k": 1, "layer_bytes": [1, 1]}
    path = tmp_path / "other.trace"
    path.write_text(json.dumps({"format": "streamd-trace"} | header) + "\n")
    with pytest.raises(ConfigError, match="of a model with 2 layers of 4 experts"):
        described(trace=path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "cpu"}, "none are wanted"),
        ({"gpu_cache": 0}, "none are wanted"),
        ({}, "this machine has no GPU that can hold any"),
    ],
)
def test_without_a_gpu_it_is_said_why(options, why, model, monkeypatch):
    def missing(ordinal):
        raise GpuError("there is no NVIDIA driver", "")

    monkeypatch.setattr(model_plan, "CudaDevice", missing)
    plan = plan_model(StreamdConfig(model=model, **options), MachineOptions())
    assert f"no slots there: {why}" in render_plan(plan)


def test_a_gpu_that_cannot_be_shared_is_named(model, monkeypatch):
    def not_shared(ordinal):
        raise GpuNotShared("this GPU cannot share its memory", "use Linux itself")

    monkeypatch.setattr(model_plan, "CudaDevice", not_shared)
    fine_disk = SimpleNamespace(align_bytes=512)
    monkeypatch.setattr(model_plan, "open_files", lambda *_: [fine_disk])
    plan = plan_model(StreamdConfig(model=model), MachineOptions())
    assert plan.gpu is None
    assert plan.gpu_refusal == "this GPU cannot share its memory (use Linux itself)"
    assert plan.host.layout.align == mmap.PAGESIZE, "slots as the daemon has them"
