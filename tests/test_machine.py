import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from weighin import bandwidth, machine, pressure, system_files

GIB = 1 << 30
NOBODY = 2**22 + 1  # above every process id that Linux gives
UNLIMITED_V1 = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cores(*physical: int) -> dict[str, str]:
    """A topology: the core that each logical CPU belongs to."""
    folder = "sys/devices/system/cpu/cpu{}/topology/"
    files = {folder.format(cpu) + "core_id": str(core) for cpu, core in enumerate(physical)}
    return files | {folder.format(cpu) + "physical_package_id": "0" for cpu in range(len(physical))}


MEMINFO = {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 25165824 kB\nSwapTotal: 1048576 kB"}


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, no GPU library, no probe, whatever the tests run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def no_probe(threads: int, seconds: float = 1.0) -> float:
        raise bandwidth.NotMeasured("not in a test")

    monkeypatch.setattr(bandwidth, "measure", no_probe)


def v2(**files: str) -> dict[str, str]:
    return {"proc/self/cgroup": "0::/user/job", **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}


class TestContainer:
    def test_v2_takes_the_tightest_limit_above_us(self, tmp_path: Path) -> None:
        files = v2(**{"user/job/memory.max": "max", "user/memory.max": str(4 * GIB), "memory.max": str(8 * GIB)})
        found = machine.look(root=write(tmp_path, MEMINFO | files))
        assert found.memory_limit_bytes == 4 * GIB
        assert found.memory_available_bytes == 4 * GIB
        assert found.memory_bytes == 32 * GIB
        assert found.swap_bytes == GIB

    def test_cached_files_count_as_available_in_v2(self, tmp_path: Path) -> None:
        job = {
            "user/job/memory.max": str(4 * GIB),
            "user/job/memory.current": str(3 * GIB),
            "user/job/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\nslab_reclaimable 0",
        }
        found = machine.look(root=write(tmp_path, MEMINFO | v2(**job)))
        assert found.memory_available_bytes == 4 * GIB - (3 * GIB - GIB - GIB // 2)

    def test_v1_nested_limit(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup/memory/"
        files = {
            "proc/self/cgroup": "4:memory:/box/inner\n1:cpu,cpuacct:/box\n0::/",
            group + "memory.limit_in_bytes": UNLIMITED_V1,
            group + "box/memory.limit_in_bytes": str(2 * GIB),
            group + "box/memory.usage_in_bytes": str(GIB),
            # the group's own files are few, those of the groups below it are many
            group + "box/memory.stat": f"cache 0\ninactive_file 0\ntotal_cache 1\ntotal_inactive_file {GIB // 2}",
            group + "box/inner/memory.limit_in_bytes": UNLIMITED_V1,
        }
        found = machine.look(root=write(tmp_path, MEMINFO | files))
        assert found.memory_limit_bytes == 2 * GIB
        assert found.memory_available_bytes == 2 * GIB - GIB // 2

    def test_a_container_that_mounts_only_its_own_part(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "4:memory:/docker/abc/sub",
            "proc/self/mountinfo": "35 31 0:32 /docker/abc /mnt/memory rw - cgroup cgroup rw,memory",
            "mnt/memory/memory.limit_in_bytes": str(3 * GIB),
            "mnt/memory/sub/memory.limit_in_bytes": str(GIB),
        }
        assert machine.look(root=write(tmp_path, MEMINFO | files)).memory_limit_bytes == GIB

    @pytest.mark.parametrize("path", ["/../../elsewhere", "/gone/away"])
    def test_a_path_from_another_namespace_falls_back_to_the_mount(self, tmp_path: Path, path: str) -> None:
        files = {"proc/self/cgroup": f"0::{path}", "sys/fs/cgroup/memory.max": str(GIB)}
        assert machine.look(root=write(tmp_path, MEMINFO | files)).memory_limit_bytes == GIB

    def test_unlimited(self, tmp_path: Path) -> None:
        job = {"user/job/memory.max": "max", "user/job/cpu.max": "max 100000"}
        found = machine.look(root=write(tmp_path, MEMINFO | cores(0, 1, 2, 3) | v2(**job)))
        assert (found.memory_limit_bytes, found.quota_cores) == (None, None)
        assert found.reasons["memory_limit_bytes"] == found.reasons["quota_cores"] == "no limit is set"
        assert found.memory_available_bytes == 24 * GIB
        assert found.threads == 4


class TestThreads:
    @pytest.mark.parametrize(
        ("quota", "expected", "threads"),
        [("150000 100000", 1.5, 1), ("50000 100000", 0.5, 1), ("300000 100000", 3.0, 3), ("9900000 100000", 99.0, 4)],
    )
    def test_v2_quota(self, tmp_path: Path, quota: str, expected: float, threads: int) -> None:
        found = machine.look(root=write(tmp_path, cores(0, 1, 2, 3) | v2(**{"user/cpu.max": quota, "user/job/x": ""})))
        assert (found.quota_cores, found.threads) == (expected, threads)

    @pytest.mark.parametrize(("quota", "expected", "threads"), [("150000", 1.5, 1), ("-1", None, 4)])
    def test_v1_quota(self, tmp_path: Path, quota: str, expected: float | None, threads: int) -> None:
        files = {
            "proc/self/cgroup": "1:cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
        found = machine.look(root=write(tmp_path, cores(0, 1, 2, 3) | files))
        assert (found.quota_cores, found.threads) == (expected, threads)

    def test_hyperthreads_count_once(self, tmp_path: Path) -> None:
        found = machine.look(root=write(tmp_path, cores(0, 1, 0, 1)))
        assert (found.cores_allowed, found.cores_physical, found.threads) == (4, 2, 2)

    def test_only_the_cores_we_may_use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2}, raising=False)
        assert machine.look(root=write(tmp_path, cores(0, 1, 2, 3))).threads == 2

    def test_core_numbers_that_start_anew_in_each_cluster(self, tmp_path: Path) -> None:
        clusters = {f"sys/devices/system/cpu/cpu{n}/topology/cluster_id": str(n // 2) for n in range(4)}
        assert machine.look(root=write(tmp_path, cores(0, 1, 0, 1) | clusters)).cores_physical == 4


class TestProcessor:
    def test_name_features_and_cache(self, tmp_path: Path) -> None:
        cache = "sys/devices/system/cpu/cpu{}/cache/index3/"
        files = {
            "proc/cpuinfo": "processor : 0\nmodel name : Zen: 4\nflags : fpu avx2 fma avx512_bf16\n\nprocessor : 1"
        }
        for cpu in range(4):
            shared = "0-1" if cpu < 2 else "2-3"
            values = {"level": "3", "size": "32768K", "shared_cpu_list": shared}
            files |= {cache.format(cpu) + k: v for k, v in values.items()}
        found = machine.look(root=write(tmp_path, files))
        assert found.cpu == "Zen: 4"
        assert found.cpu_features == ("avx2", "avx512_bf16", "fma")
        assert found.l3_bytes == 64 << 20
        assert system_files.l3_cache(tmp_path, threads=1) == 32 << 20

    def test_arm(self, tmp_path: Path) -> None:
        text = "processor : 0\nFeatures : fp asimd i8mm bf16 sve\nCPU part : 0xd40"
        found = machine.look(root=write(tmp_path, {"proc/cpuinfo": text}))
        assert (found.cpu, found.cpu_features) == ("ARM part 0xd40", ("asimd", "i8mm", "bf16"))

    def test_macos(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "machdep.cpu.brand_string: Apple M2\nhw.optional.neon: 1\nhw.optional.arm.FEAT_BF16: 1\nhw.optional.x: 0"
        monkeypatch.setattr("platform.system", lambda: "Darwin")
        monkeypatch.setattr("platform.machine", lambda: "arm64")
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))
        found = machine.look(root=tmp_path)
        assert (found.cpu, found.cpu_features, found.mps) == ("Apple M2", ("neon", "bf16"), True)
        assert pressure.snapshot(tmp_path) is None


def test_every_none_has_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: None)
    found = machine.look(root=tmp_path)
    unknown = {name for name, value in msgspec.structs.asdict(found).items() if value is None}
    assert unknown == {
        "cpu", "cores_physical", "quota_cores", "l3_bytes", "memory_limit_bytes", "memory_bandwidth", "governor",
        "on_battery",
    }  # fmt: skip
    assert {name for name, reason in found.reasons.items() if reason} == unknown
    assert found.memory_bytes > 0
    assert found.threads == 4
    assert "nvidia-ml-py" in (found.gpu_reason or "")


class NvmlError(Exception):
    pass


def stub_nvml(monkeypatch: pytest.MonkeyPatch, *, processes: list[SimpleNamespace], **changes: object) -> None:
    """Two GPUs; a handle is its number."""

    def unsupported(*_: object) -> None:
        raise NvmlError("Not Supported")

    nvml = ModuleType("pynvml")
    functions: dict[str, object] = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetIndex": lambda h: h,
        "nvmlDeviceGetName": lambda h: ["NVIDIA T4", b"NVIDIA L4"][h],
        "nvmlDeviceGetUUID": lambda h: ["GPU-aaaa-1", "GPU-bbbb-2"][h],
        "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=16 * GIB, free=15 * GIB),
        "nvmlDeviceGetCudaComputeCapability": lambda h: (8, 9),
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetComputeRunningProcesses": lambda h: processes,
        "nvmlDeviceGetGraphicsRunningProcesses": unsupported,
    }
    for name, value in (functions | changes).items():
        setattr(nvml, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


class TestGpus:
    def test_visible_one_with_our_own_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        held = ((os.getpid(), GIB), (os.getppid(), 1), (NOBODY, None))
        stub_nvml(monkeypatch, processes=[SimpleNamespace(pid=pid, usedGpuMemory=n) for pid, n in held])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        found = machine.look(root=tmp_path)
        (gpu,) = found.gpus
        assert (gpu.index, gpu.name, gpu.compute_capability, gpu.driver) == (1, "NVIDIA L4", "8.9", "580.1")
        assert (gpu.memory_bytes, gpu.memory_free_bytes) == (16 * GIB, 15 * GIB)
        ours, notebook, other = gpu.processes
        assert (ours.pid, ours.bytes, ours.ours) == (os.getpid(), GIB, True)
        assert notebook.ours
        assert (other.name, other.bytes, other.ours) == (None, None, False)
        assert found.gpu_reason is None

    @pytest.mark.parametrize(
        ("visible", "expected"),
        [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-bbbb", [1]), ("0,7,1", [0]), ("GPU-", []), ("7", []), ("-1", [])],
    )
    def test_visible_devices(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[int]
    ) -> None:
        stub_nvml(monkeypatch, processes=[])
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = machine.look(root=tmp_path)
        assert [gpu.index for gpu in found.gpus] == expected
        assert (found.gpu_reason is None) == bool(expected)

    def test_empty_variable_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert "CUDA_VISIBLE_DEVICES is empty" in (machine.look(root=tmp_path).gpu_reason or "")

    def test_no_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise NvmlError("Shared Library Not Found")

        stub_nvml(monkeypatch, processes=[], nvmlInit=fail)
        found = machine.look(root=tmp_path)
        assert (found.gpus, found.gpu_reason) == ((), "no NVIDIA driver (NVML: Shared Library Not Found)")


def test_the_policy_of_the_clock(tmp_path: Path) -> None:
    files = {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}
    found = machine.look(root=write(tmp_path, files))
    assert found.governor == "powersave"
    assert "governor" not in found.reasons


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({"AC": ("Mains", "1"), "BAT0": ("Battery", None)}, False),
        ({"AC": ("Mains", "0"), "BAT0": ("Battery", None)}, True),
        ({"AC": ("Mains", "0"), "USBC": ("Mains", "1")}, False),
        ({"BAT0": ("Battery", None)}, None),
    ],
)
def test_on_battery(tmp_path: Path, supplies: dict[str, tuple[str, str | None]], expected: bool | None) -> None:
    files = {}
    for name, (kind, online) in supplies.items():
        files[f"sys/class/power_supply/{name}/type"] = kind
        files |= {f"sys/class/power_supply/{name}/online": online} if online else {}
    found = machine.look(root=write(tmp_path, files))
    assert found.on_battery is expected
    assert ("on_battery" in found.reasons) == (expected is None)


def test_key_ignores_what_comes_and_goes(tmp_path: Path) -> None:
    found = machine.look(root=write(tmp_path, MEMINFO))
    busy = msgspec.structs.replace(found, memory_available_bytes=1, disk_free_bytes=1, memory_bandwidth=1.0)
    other = msgspec.structs.replace(found, memory_bytes=2 * found.memory_bytes)
    assert found.key == busy.key != other.key


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = machine.look(measure=False)
    assert 1 <= found.threads <= found.cores_allowed <= found.cores_logical
    assert 0 < found.memory_available_bytes <= found.memory_bytes
    assert found.gpus or found.gpu_reason
    assert msgspec.json.decode(msgspec.json.encode(found), type=machine.Machine) == found
    assert machine.look(measure=False).key == found.key
    if sys.platform == "linux":
        assert found.cpu
        before, after = pressure.snapshot(), pressure.snapshot()
        assert before and after and after.since(before).total_jiffies is not None
