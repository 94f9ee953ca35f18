"""hardware: the table agrees with itself; what `current` makes of devices."""

import dataclasses
import itertools
import types

import jax
import pytest

from pallas_gemm import compat, hardware


def pretend(monkeypatch, **attributes):
  device = types.SimpleNamespace(platform="gpu", **attributes)
  monkeypatch.setattr(compat, "target_device", lambda: device)


@pytest.mark.parametrize("name", hardware.known_names())
def test_rates_follow_from_lanes_and_clock_and_sizes_are_plausible(name):
  gpu = hardware.lookup(name)
  fp32 = 2 * gpu.sm_count * gpu.fp32_lanes_per_sm * gpu.clock_hz
  assert gpu.fp32_flops == pytest.approx(fp32, rel=0.02)
  assert gpu.fp32_flops <= gpu.tf32_flops
  tensor_cores = 2 if gpu.compute_capability >= (8, 0) else 1
  ratio = gpu.bf16_flops / gpu.tf32_flops
  assert ratio == pytest.approx(tensor_cores, rel=0.025)
  assert gpu.modelled_on is None
  of_cuda = 1024 if gpu.compute_capability >= (8, 0) else 0
  assert gpu.shared_bytes_per_sm - gpu.shared_bytes_per_block == of_cuda
  assert gpu.shared_bytes_per_block < 256 * 1024
  assert gpu.registers_per_sm == 65536
  assert gpu.max_threads_per_sm in (1024, 1536, 2048)
  assert 1 << 21 < gpu.l2_bytes < 1 << 28
  assert 1e11 < gpu.dram_bytes_per_s < 1e13


def test_hopper_limits():
  gpu = hardware.lookup("NVIDIA H200")
  assert gpu.compute_capability == (9, 0)
  assert gpu.shared_bytes_per_block == 232448
  assert gpu.shared_bytes_per_s == pytest.approx(33.5e12, rel=0.01)


# Registers, threads, shared bytes; blocks, warps, limit. As NVIDIA's
# occupancy calculator has them.
@pytest.mark.parametrize(
  ("kernel", "room"),
  [
    ((32, 256, 0), (8, 64, "registers and threads")),
    ((16, 256, 0), (8, 64, "threads")),
    ((16, 32, 0), (32, 32, "blocks")),
    ((16, 33, 0), (32, 64, "threads and blocks")),
    ((33, 64, 0), (24, 48, "registers")),  # as many as 40 registers
    ((40, 512, 0), (3, 48, "registers")),
    ((64, 1024, 0), (1, 32, "registers")),
    ((65, 1024, 0), (0, 0, "registers")),
    ((168, 384, 0), (1, 12, "registers")),
    ((255, 128, 0), (2, 8, "registers")),
    ((32, 128, 48 << 10), (4, 16, "shared memory")),
    ((32, 128, 75 << 10), (3, 12, "shared memory")),
    ((32, 128, (75 << 10) + 1), (2, 8, "shared memory")),
    ((32, 128, 232448), (1, 4, "shared memory")),
    ((32, 128, 232449), (0, 0, "shared memory")),
  ],
)
def test_occupancy_of_an_h200(kernel, room):
  registers, threads, shared = kernel
  found = hardware.occupancy(
    hardware.lookup("H200"),
    registers=registers,
    threads=threads,
    shared_bytes=shared,
  )
  assert dataclasses.astuple(found) == room


@pytest.mark.parametrize(
  ("name", "blocks"),
  [("T4", 16), ("A10", 16), ("L4", 24), ("RTX 5090", 24), ("B200", 32)],
)
def test_blocks_that_an_sm_can_hold(name, blocks):
  gpu = hardware.lookup(name)
  found = hardware.occupancy(gpu, registers=16, threads=32, shared_bytes=0)
  assert (found.blocks, found.limit) == (blocks, "blocks")
  wide = hardware.occupancy(gpu, registers=16, threads=512, shared_bytes=0)
  assert wide.warps == gpu.max_threads_per_sm // hardware.WARP_THREADS


@pytest.mark.parametrize(
  ("spelled", "name"),
  [
    ("h200", "NVIDIA H200"),
    ("nvidia h200", "NVIDIA H200"),
    (" H200 ", "NVIDIA H200"),
    ("H200 NVL", "NVIDIA H200 NVL"),
    ("RTX 3090", "NVIDIA GeForce RTX 3090"),
    ("T4", "Tesla T4"),
    ("H100", "NVIDIA H100 80GB HBM3"),
    ("nvidia gh200", "NVIDIA GH200 480GB"),
  ],
)
def test_lookup_forgives_spelling(spelled, name):
  assert hardware.lookup(spelled).name == name


@pytest.mark.parametrize("name", ["H20", "", "cpu", "A100"])
def test_lookup_of_an_unknown_name_lists_the_known(name):
  with pytest.raises(ValueError, match="name must be a known GPU") as error:
    hardware.lookup(name)
  for known in hardware.known_names():
    assert known in str(error.value)
  with pytest.raises(ValueError, match="known GPU"), hardware.assume(name):
    pass


def test_without_a_gpu_the_default_is_modelled(monkeypatch):
  monkeypatch.setattr(compat, "targets_gpu", lambda: False)
  assert hardware.current() == hardware.lookup(hardware.DEFAULT_NAME)


@pytest.mark.parametrize("name", ["H100 PCIe", "H200", "A100-SXM4-80GB"])
def test_assume_is_seen_by_current_and_by_a_trace(name):
  seen, before = [], hardware.current()

  def f(x):
    seen.append(hardware.sm_count())
    return x

  with hardware.assume(name) as gpu:
    assert compat.targets_gpu()
    assert hardware.current() == gpu == hardware.lookup(name)
    jax.jit(f).trace(jax.ShapeDtypeStruct((1,), "float32"))
  assert seen == [gpu.sm_count] and hardware.current() == before


@pytest.mark.parametrize("told", [{}, {"core_count": 66}])
def test_a_known_device_has_the_sm_count_that_it_reports(monkeypatch, told):
  pretend(monkeypatch, device_kind="NVIDIA H200", **told)
  row, sms = hardware.lookup("H200"), told.get("core_count", 132)
  assert hardware.current() == dataclasses.replace(row, sm_count=sms)
  assert hardware.sm_count() == sms


def test_an_unknown_device_is_scaled_from_its_peer(monkeypatch):
  pretend(
    monkeypatch,
    device_kind="NVIDIA H800 half",
    core_count=57,
    compute_capability="9.0",
    shared_memory_per_block_optin=200000,
  )
  gpu, peer = hardware.current(), hardware.lookup("H100 PCIe")
  assert (gpu.name, gpu.modelled_on) == ("NVIDIA H800 half", peer.name)
  assert gpu.compute_capability == (9, 0)
  assert gpu.shared_bytes_per_block == 200000
  assert gpu.sm_count == 57
  for field in ("fp32_flops", "tf32_flops", "bf16_flops", "dram_bytes_per_s"):
    assert getattr(gpu, field) == pytest.approx(getattr(peer, field) / 2)


@pytest.mark.parametrize(
  ("reported", "peer"),
  [("10.4", (10, 3)), ("12.2", (12, 1)), ("8.8", (8, 7)), ("11.0", (10, 3))],
)
def test_a_newer_capability_takes_the_nearest_older(
  monkeypatch, reported, peer
):
  pretend(monkeypatch, device_kind="new", compute_capability=reported)
  gpu = hardware.current()
  assert hardware.lookup(gpu.modelled_on).compute_capability == peer
  assert gpu.compute_capability == tuple(map(int, reported.split(".")))


@pytest.mark.parametrize(
  ("reported", "capability", "has"),
  [
    ("7.0", (7, 0), "7.0"),
    ("", (0, 0), "none that is known"),
    (None, (0, 0), "none that is known"),
  ],
)
def test_a_gpu_older_than_the_table_or_that_tells_nothing(
  monkeypatch, reported, capability, has
):
  pretend(
    monkeypatch,
    device_kind="strange",
    compute_capability=reported,
    core_count=20,
    shared_memory_per_block_optin=49152,
  )
  gpu, oldest = hardware.current(), hardware.lookup("T4")
  assert (gpu.name, gpu.modelled_on) == ("strange", oldest.name)
  assert gpu.compute_capability == capability
  assert (gpu.sm_count, gpu.shared_bytes_per_block) == (20, 49152)
  assert gpu.fp32_flops == oldest.fp32_flops / 2
  assert hardware.why_not("x", ("mma",)) == (
    "x needs CUDA 13's ptxas, which compute capability 7.5 and later have;"
    f" strange has {has}"
  )


@pytest.mark.parametrize(
  "device",
  [
    {"device_kind": "AMD Instinct MI300X", "compute_capability": "gfx942"},
    {"device_kind": "AMD Instinct MI300X"},
    {"device_kind": "gfx90a"},
    {"device_kind": "strange", "platform": "rocm"},
  ],
)
def test_a_gpu_of_amd_is_none_that_kernels_run_on(monkeypatch, device):
  device = types.SimpleNamespace(**{"platform": "gpu"} | device)
  assert compat.is_amd(device)
  monkeypatch.setattr(compat, "target_device", lambda: device)
  assert not compat.targets_gpu()
  assert hardware.current() == hardware.lookup(hardware.DEFAULT_NAME)


@pytest.mark.parametrize(
  ("name", "has"),
  [
    ("T4", ()),
    ("A100-SXM4-80GB", ("mbarrier", "mma")),
    ("RTX 4090", ("mbarrier", "mma")),
    ("H200", set(hardware.FEATURES) - {"ptxas", "tcgen05"}),
    ("GB300", set(hardware.FEATURES) - {"ptxas", "wgmma"}),
    ("RTX 5090", set(hardware.FEATURES) - {"ptxas", "wgmma", "tcgen05"}),
  ],
)
def test_what_a_gpu_has(name, has):
  gpu = hardware.lookup(name)
  found = {need for need in hardware.FEATURES if not gpu.lacks(need)}
  assert found == {"ptxas", *has}
  for need in hardware.FEATURES:
    assert (hardware.why_not("x", (need,), gpu) is None) == (need in found)


def test_what_is_interpreted_needs_nothing(monkeypatch):
  assert hardware.why_not("x", hardware.FEATURES) is None
  device = types.SimpleNamespace(platform="gpu", device_kind="AMD gfx90a")
  monkeypatch.setattr(compat, "target_device", lambda: device)
  reason = "x needs an NVIDIA GPU, this is for AMD gfx90a"
  assert hardware.why_not("x", ()) == reason


def test_a_mesh_that_is_set_is_of_this_machines_gpu(monkeypatch):
  """JAX's abstract device of a mesh has a name, and no compute capability."""
  here = types.SimpleNamespace(
    platform="gpu",
    device_kind="NVIDIA H20",
    compute_capability="9.0",
    core_count=78,
  )
  monkeypatch.setattr(jax, "devices", lambda: [here])
  for name, capability in (("NVIDIA H20", (9, 0)), ("NVIDIA H21", (0, 0))):
    device = jax.sharding.AbstractDevice(
      device_kind=name, platform="gpu", num_cores=78
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
      assert hardware.current().compute_capability == capability
      assert hardware.sm_count() == 78


def test_assumed_gpus_are_told_apart():
  seen = []
  for name in ("A100-SXM4-80GB", "H200", "A100-SXM4-80GB"):
    with hardware.assume(name):
      seen.append(compat.target_device())
  assert [device.compute_capability for device in seen] == ["8.0", "9.0", "8.0"]
  assert seen[0] == seen[2] and hash(seen[0]) == hash(seen[2])
  assert seen[0] != seen[1]
  plain = jax.sharding.AbstractDevice(
    device_kind=seen[0].device_kind,
    platform="gpu",
    num_cores=seen[0].num_cores,
  )
  assert plain != seen[0]


def test_a_gpu_that_has_no_row_is_assumed():
  row = hardware.lookup("RTX 5090")
  other = dataclasses.replace(row, name="NVIDIA RTX PRO 2000", sm_count=34)
  with hardware.assume(other) as gpu:
    found = hardware.current()
  assert gpu is other and found.modelled_on
  assert (found.name, found.compute_capability) == (other.name, (12, 0))
  assert found.sm_count == 34


def test_clusters_that_surely_run_together():
  """Whichever SMs of the eight GPCs work: pairs, of which a GPC has 9."""
  for blocks, found in ((1, 132), (2, 66), (4, 29), (8, 13)):
    assert hardware.clusters_at_once(blocks, 132) == found
  ways = itertools.combinations_with_replacement(range(10), 8)
  of_132 = [way for way in ways if sum(way) == 66]
  for blocks in (2, 4, 6, 8):
    found = min(sum(x // (blocks // 2) for x in way) for way in of_132)
    assert hardware.clusters_at_once(blocks, 132) == found
  assert hardware.clusters_at_once(4, 2) == 1
