"""A real Prometheus for tests: Debian's package, on 127.0.0.1, with a folder of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cluster.processes import Processes
from tests.support.waiting import wait_until

SCRAPE_INTERVAL_S = 1
TOOL_S_MAX = 100


def program(name: str) -> str:
    """``prometheus`` or ``promtool``; a named skip when it cannot be had."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is missing (Debian: apt install prometheus)")
    return path


def promtool(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=TOOL_S_MAX, check=False
    )


class Prometheus:
    """A running server; its query API."""

    def __init__(
        self,
        processes: Processes,
        targets: Sequence[tuple[str, str, dict[str, str]]],
        rules: Path,
    ) -> None:
        """``targets``: (job, address, labels)."""
        config = processes.directory / "prometheus.yaml"
        config.write_text(yaml.safe_dump(_config(targets, rules)))
        command = [
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={processes.directory / 'tsdb'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        process = processes.spawn("prometheus", command)
        self._log = processes.log("prometheus")
        wait_until("prometheus listens", lambda: self._address() or process.poll() is not None)
        assert process.poll() is None, self._log.read_text()
        self._url = f"http://{self._address()}/api/v1/"
        wait_until("prometheus is ready", lambda: "ready to receive" in self._log.read_text())

    def _address(self) -> str:
        found = re.search(r'msg="Listening on" address=(\S+)', self._log.read_text())
        return found.group(1) if found else ""

    def get(self, path: str, **parameters: Any) -> Any:
        """What the API answers under ``data``; fails with its error."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{query}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def now(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def over(self, expression: str, seconds: int, step_s: int = 1) -> list[dict[str, Any]]:
        """The result of a range query that ends now, as Grafana asks."""
        end = float(self.get("query", query="time()")["result"][1])
        parameters = {"query": expression, "start": end - seconds, "end": end, "step": step_s}
        found: list[dict[str, Any]] = self.get("query_range", **parameters)["result"]
        return found


def _config(targets: Sequence[tuple[str, str, dict[str, str]]], rules: Path) -> dict[str, Any]:
    jobs = sorted({job for job, _, _ in targets})
    return {
        "global": {
            "scrape_interval": f"{SCRAPE_INTERVAL_S}s",
            "evaluation_interval": f"{SCRAPE_INTERVAL_S}s",
        },
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {"targets": [address], "labels": labels}
                    for its, address, labels in targets
                    if its == job
                ],
            }
            for job in jobs
        ],
    }
