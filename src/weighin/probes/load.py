"""How long until the model can answer: importing the engine, loading the weights, warm and cold."""

from __future__ import annotations

import gc
import importlib.metadata
import platform

from weighin.probes import Measure, Probe, Session
from weighin.probes.disk import bytes_read, evict, weight_files

COLD_IMPORT = 50e6  # bytes from the disk from which an import is no warm one
WARM_SHARE = 0.10  # at most this share of the weights came from the disk
COLD_SHARE = 0.90  # at least this share did


class LoadProbe(Probe):
    jobs = ("speed", "cold", "responses", "samples", "score", "floor", "tasks", "answer")
    order = 0
    measures = {  # noqa: RUF012 - a ClassVar of the contract
        "import_seconds": Measure("importing the engine", "s", "lower"),
        "load_seconds": Measure("loading, warm page cache", "s", "lower"),
        "load_cold_seconds": Measure("loading, cold page cache", "s", "lower"),
        "ready_cold_seconds": Measure("start of the process to first token, cold page cache", "s", "lower"),
    }

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.files = weight_files(session.job)
        self.size = sum(file.stat().st_size for file in self.files)

    def run(self) -> None:
        session, engine = self.session, self.session.engine
        cold = session.job.kind == "cold"
        session.disk_read_before = bytes_read() or 0
        if cold:
            evict(self.files)
        with session.phase("import"):
            session.settle()
            began = session.clock()
            engine.import_packages()
            import_seconds = session.clock() - began
        read = (bytes_read() or 0) - session.disk_read_before
        if read < COLD_IMPORT:
            session.sample("import_seconds", import_seconds)
        else:
            session.unknown("import_seconds", f"{read / 1e6:.0f} MB came from the disk, so this was no warm import")
        session.emit({"event": "versions", "versions": _versions(session.job.settings["dependencies"])})
        before = bytes_read()
        with session.phase("load"):
            gc.collect()  # what importing left behind is not the load's to clear away
            session.settle()
            began = session.clock()
            engine.load()
            load_seconds = session.clock() - began
        session.emit({"event": "effective", "effective": engine.effective()})
        if cold:
            self._cold(before, load_seconds)
        else:
            self._warm(before, load_seconds)

    def _warm(self, before: int | None, seconds: float) -> None:
        """A load that mostly read the disk is no warm load, whatever was asked for."""
        after = bytes_read()
        if before is None or after is None or after - before <= WARM_SHARE * self.size:
            self.session.sample("load_seconds", seconds)
            return
        share = (after - before) / max(self.size, 1)
        self.session.unknown("load_seconds", f"{share:.0%} of the weights came from the disk, so this was no warm load")
        if share >= COLD_SHARE:
            self.session.sample("load_cold_seconds", seconds)

    def _cold(self, before: int | None, seconds: float) -> None:
        """Some engines map the file and read it with the first token: the proof of cold is taken after it."""
        session = self.session
        with session.phase("cold_token"):
            call = session.call("cold", 0, session.job.prompts[0], 1)
        after = bytes_read()
        if session.engine.virtual:
            share = 1.0
        elif before is None or after is None:
            for key in ("load_cold_seconds", "ready_cold_seconds"):
                session.unknown(key, "bytes read from the disk cannot be seen here (/proc/self/io)")
            return
        else:
            share = (after - before) / max(self.size, 1)
        if share < COLD_SHARE:
            reason = f"the page cache could not be emptied: only {share:.0%} of the weights came from the disk"
            session.unknown("load_cold_seconds", reason)
            session.unknown("ready_cold_seconds", reason)
            return
        session.sample("load_cold_seconds", seconds)
        session.sample("ready_cold_seconds", call.times[0] - session.job.spawned_at)


def _versions(packages: list[str]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = _module_version(package)
    return {package: version for package, version in versions.items() if version}


def _module_version(package: str) -> str:
    """Carried packages have no metadata; CUDA is no package at all."""
    import sys

    if package == "CUDA":
        torch = sys.modules.get("torch")
        return str(getattr(getattr(torch, "version", None), "cuda", "") or "")
    return str(getattr(sys.modules.get(package), "__version__", ""))


PROBE = LoadProbe
