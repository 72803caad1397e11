"""What the machine is: cores, caches, measured bandwidth, GPUs, and the limits of its container."""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from weighin.bandwidth import remembered
from weighin.system_files import (
    ROOT,
    allowed_cores,
    available_memory,
    cpu_quota,
    groups,
    l3_cache,
    machine_memory,
    memory_limit,
    read_text,
)

# The features that decide which kernels an engine picks.
FEATURES = (
    *("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "f16c", "fma"),
    *("neon", "asimd", "i8mm", "bf16"),
)


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a GPU."""

    pid: int
    name: str | None
    bytes: int | None
    ours: bool  # this process or one of its ancestors (the user's notebook)


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that CUDA programs see; `index` is the driver's number for it, as in nvidia-smi."""

    index: int
    name: str
    memory_bytes: int
    memory_free_bytes: int
    compute_capability: str | None
    driver: str | None
    processes: tuple[GpuProcess, ...]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the machine; a field that is None has its reason in `reasons`."""

    system: str
    python: str
    cpu: str | None
    cores_physical: int | None  # of those allowed; two hyperthreads count once
    cores_logical: int
    cores_allowed: int
    quota_cores: float | None
    threads: int  # what every engine gets
    cpu_features: tuple[str, ...]
    l3_bytes: int | None  # all the caches that the allowed cores reach
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    swap_bytes: int
    memory_bandwidth: float | None  # bytes per second, read by `threads` threads
    disk_free_bytes: int | None
    governor: str | None  # the policy of the processor's clock
    on_battery: bool | None
    gpus: tuple[Gpu, ...]
    gpu_reason: str | None  # why there is none, or why they are unknown
    mps: bool
    reasons: dict[str, str]

    @property
    def key(self) -> str:
        """The same for the same machine and container, whatever else runs on it."""
        # Memory in GiB: a kernel update moves MemTotal by some pages.
        memory = [round(n / 2**30) for n in (self.memory_bytes, self.memory_limit_bytes or 0)]
        cores = (self.cores_physical, self.cores_logical, self.cores_allowed, self.threads)
        identity = msgspec.json.encode((self.cpu, platform.machine(), cores, memory, [gpu.name for gpu in self.gpus]))
        return hashlib.sha256(identity).hexdigest()[:16]


def look(cache: Path | None = None, *, measure: bool = True, root: Path = ROOT) -> Machine:
    """Look at this machine. `measure` reads memory for about a second, once per machine where there is a cache."""
    allowed = allowed_cores()
    physical = _physical_cores(root, allowed)
    cpu, features = _cpu(root)
    cpu_groups, memory_groups = groups(root, "cpu"), groups(root, "memory")
    quota = min((q for q in map(cpu_quota, cpu_groups) if q is not None), default=None)
    limit = min((n for n in map(memory_limit, memory_groups) if n is not None), default=None)
    memory, swap = machine_memory(root)
    gpus, gpu_reason = _gpus()
    l3 = l3_cache(root)
    disk, disk_reason = _disk_free(cache)
    governor = read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    on_battery = _on_battery(root)
    unread = "no cgroup can be read here"
    why = {
        "cpu": (cpu, "neither /proc/cpuinfo nor the system names the CPU"),
        "cores_physical": (physical, "the system does not say which cores are hyperthreads"),
        "quota_cores": (quota, "no limit is set" if cpu_groups else unread),
        "l3_bytes": (l3, "the system shows no level-3 cache"),
        "memory_limit_bytes": (limit, "no limit is set" if memory_groups else unread),
        "disk_free_bytes": (disk, disk_reason),
        "governor": (governor, "the system shows no clock policy, as virtual machines do not"),
        "on_battery": (on_battery, "the system shows no power supply"),
    }
    reasons = {field: reason for field, (value, reason) in why.items() if value is None}
    machine = Machine(
        system=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        python=platform.python_version(),
        cpu=cpu,
        cores_physical=physical,
        cores_logical=os.cpu_count() or len(allowed),
        cores_allowed=len(allowed),
        quota_cores=quota,
        threads=max(1, min(len(allowed), physical or len(allowed), len(allowed) if quota is None else int(quota))),
        cpu_features=features,
        l3_bytes=l3,
        memory_bytes=memory,
        memory_available_bytes=available_memory(root),
        memory_limit_bytes=limit,
        swap_bytes=swap,
        memory_bandwidth=None,
        disk_free_bytes=disk,
        governor=governor,
        on_battery=on_battery,
        gpus=gpus,
        gpu_reason=gpu_reason,
        mps=platform.system() == "Darwin" and platform.machine() == "arm64",
        reasons=reasons,
    )
    bandwidth, reason = remembered(machine.key, machine.threads, cache, measure)
    if reason is not None:
        reasons["memory_bandwidth"] = reason
    return msgspec.structs.replace(machine, memory_bandwidth=bandwidth)


def _on_battery(root: Path) -> bool | None:
    """Whether no mains supply is plugged in; None where there is none to ask."""
    supplies = sorted((root / "sys/class/power_supply").glob("*"))
    mains = [read_text(supply / "online") for supply in supplies if read_text(supply / "type") == "Mains"]
    return all(online != "1" for online in mains) if mains else None


def _disk_free(cache: Path | None) -> tuple[int | None, str]:
    """Free bytes where the cache is or will be."""
    try:
        folder = (cache or Path.cwd()).absolute()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free, ""
    except OSError as error:
        return None, f"the disk cannot be asked: {error}"


def _physical_cores(root: Path, allowed: set[int]) -> int | None:
    cores = set()
    for core in allowed:
        folder = root / f"sys/devices/system/cpu/cpu{core}/topology"
        # Some ARM kernels number cores anew in each cluster.
        cores.add(tuple(read_text(folder / f) for f in ("core_id", "physical_package_id", "die_id", "cluster_id")))
    if all(core[0] and core[1] for core in cores):
        return len(cores)
    import psutil

    count = psutil.cpu_count(logical=False)
    return min(int(count), len(allowed)) if count else None


def _cpu(root: Path) -> tuple[str | None, tuple[str, ...]]:
    """The CPU's name and those of its features that matter."""
    text = read_text(root / "proc/cpuinfo")
    if text is None and platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.optional"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            text = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    # The first core speaks for all: later lines do not replace earlier ones.
    pairs = [(k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in (text or "").splitlines())]
    info = dict(reversed(pairs))
    flags = {*info.get("flags", "").split(), *info.get("Features", "").split()}
    flags |= {k.rpartition(".")[2].removeprefix("FEAT_").removesuffix("_0").lower() for k, v in pairs if v == "1"}
    arm = f"ARM part {info['CPU part']}" if "CPU part" in info else None
    name = next((info[k] for k in ("model name", "machdep.cpu.brand_string", "Model", "Hardware") if info.get(k)), arm)
    return name, tuple(f for f in FEATURES if f in flags)


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return (), f"CUDA_VISIBLE_DEVICES is {visible.strip() or 'empty'}: it hides every GPU"
    try:
        import pynvml
    except ImportError as error:
        return (), f"GPUs cannot be asked for: {error} (pip install nvidia-ml-py)"
    try:
        pynvml.nvmlInit()
    except Exception as error:  # a stub library in a container may fail in its own ways
        return (), f"no NVIDIA driver (NVML: {error})"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if visible is not None:
            handles = list(_visible(pynvml, visible, handles))
        if not handles:
            hidden = f"CUDA_VISIBLE_DEVICES={visible} names none of them" if visible is not None else "it shows no GPU"
            return (), f"the NVIDIA driver is there, but {hidden}"
        return tuple(_gpu(pynvml, handle) for handle in handles), None
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver does not answer (NVML: {error})"
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _visible(nvml: Any, visible: str, handles: list[Any]) -> Iterator[Any]:
    """As CUDA reads the variable: in its order, up to the first entry that names nothing."""
    for entry in (e.strip() for e in visible.split(",")):
        if entry.isdecimal() and int(entry) < len(handles):
            yield handles[int(entry)]
        elif entry.startswith("MIG-"):
            yield nvml.nvmlDeviceGetHandleByUUID(entry)
        else:
            found = [h for h in handles if _text(nvml.nvmlDeviceGetUUID(h)).startswith(entry)]
            if not entry.startswith("GPU-") or len(found) != 1:
                return
            yield found[0]


def _gpu(nvml: Any, handle: Any) -> Gpu:
    import psutil

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except (nvml.NVMLError, psutil.Error):
            return None

    ours = {os.getpid(), *(p.pid for p in ask(psutil.Process().parents) or ())}
    running = [*(ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ())]
    running += ask(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
    memory, capability = nvml.nvmlDeviceGetMemoryInfo(handle), ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    driver = ask(nvml.nvmlSystemGetDriverVersion)
    held = {p.pid: p.usedGpuMemory for p in running}
    names = {pid: ask(lambda pid: psutil.Process(pid).name(), pid) for pid in held}
    return Gpu(
        index=nvml.nvmlDeviceGetIndex(handle),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=memory.total,
        memory_free_bytes=memory.free,
        compute_capability=".".join(map(str, capability)) if capability else None,
        driver=_text(driver) if driver else None,
        processes=tuple(GpuProcess(pid=p, name=names[p], bytes=n, ours=p in ours) for p, n in held.items()),
    )


def _text(value: Any) -> str:
    # Old bindings give bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
