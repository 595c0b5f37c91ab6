"""Where the lease of a broker group is kept: a file, or a Lease object of Kubernetes.

Both give the same: read the record with its version, write a record if the version is still that
one. Blocking work is done in threads, with deadlines: LeaseUnavailable means that nothing is known,
not even whether a write was done.

``in_sync`` and ``electable``, the two sets of members that unplanned fail-over needs, will be
fields of the record, here as JSON and as annotations; nothing else of this module changes then.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from cometmq.errors import ConfigInvalid, LeaseConflict, LeaseUnavailable
from cometmq.replication.lease import LeaseRecord

T = TypeVar("T")

DEADLINE_S = 5.0  # of one reading or writing
NOT_THERE = ""  # the version of a lease that nobody has written


class Reading(NamedTuple):
    """The lease at one moment. ``record`` is None while nobody has written one."""

    record: LeaseRecord | None
    version: str


class Lease(Protocol):
    """One broker group's lease. Both methods raise LeaseUnavailable."""

    async def read(self) -> Reading: ...

    async def write(self, record: LeaseRecord, version: str) -> str:
        """Write ``record`` if the version is still ``version``; the new one. LeaseConflict: it is
        not, and nothing was written.
        """


def open_lease(url: str) -> Lease:
    """``file:///path/of/lease.json`` or ``kubernetes://namespace/name``. ConfigInvalid."""
    parts = urlsplit(url)
    name = unquote(parts.path)
    if parts.scheme == "file" and not parts.netloc and name.strip("/"):
        return FileLease(Path(name))
    if parts.scheme == "kubernetes" and parts.netloc and name.strip("/"):
        return KubernetesLease(parts.netloc, name.strip("/"))
    raise ConfigInvalid(f"option lease: {url!r} is neither file:///path nor kubernetes://ns/name")


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.to_thread(work)
    except TimeoutError:
        raise LeaseUnavailable(f"no answer about the lease within {DEADLINE_S:g} s") from None
    except OSError as error:
        raise LeaseUnavailable(f"the lease cannot be reached: {error}") from error


# --- a file ---------------------------------------------------------------------------------------


class FileLease:
    """A JSON file that is replaced as a whole, under a lock on a file beside it.

    For one machine, or a file system with working locks: development, tests, two processes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = path.with_name(f"{path.name}.lock")

    async def read(self) -> Reading:
        return await _in_thread(self._read)

    async def write(self, record: LeaseRecord, version: str) -> str:
        return await _in_thread(lambda: self._write(record, version))

    def _read(self) -> Reading:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return Reading(LeaseRecord(**content["record"]), str(content["version"]))
        except FileNotFoundError:
            return Reading(None, NOT_THERE)
        except (ValueError, KeyError, TypeError) as error:
            raise LeaseUnavailable(f"{self._path} does not read as a lease: {error}") from error

    def _write(self, record: LeaseRecord, version: str) -> str:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self._read().version
            if found != version:
                raise LeaseConflict(f"the lease has version {found or 'none'}, not {version}")
            new = str(int(found or 0) + 1)
            self._replace(json.dumps({"version": new, "record": asdict(record)}, indent=2))
        return new

    def _replace(self, text: str) -> None:
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        with draft.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)


# --- Kubernetes -----------------------------------------------------------------------------------

PREFIX = "cometmq.io/"
Body = dict[str, Any]  # a Lease as JSON


class KubernetesLease:
    """``coordination.k8s.io/v1`` Lease: the standard fields for people and tools, all of the record
    in annotations; versions are ``resourceVersion``. ``connect`` makes the API (in a thread: the
    package takes seconds to import).
    """

    def __init__(self, namespace: str, name: str, connect: Callable[[], Any] | None = None) -> None:
        self._namespace = namespace
        self._name = name
        self._connect = connect or _cluster_api
        self._api: Any = None
        self._last: Body = {}  # as read or written last: labels and owners stay as they are

    async def read(self) -> Reading:
        return await _in_thread(self._read)

    async def write(self, record: LeaseRecord, version: str) -> str:
        return await _in_thread(lambda: self._write(record, version))

    def _read(self) -> Reading:
        found = self._call("read_namespaced_lease", self._name, missing_is_none=True)
        if found is None:
            self._last = {}
            return Reading(None, NOT_THERE)
        self._last = found
        return Reading(record_of(found), found["metadata"]["resourceVersion"])

    def _write(self, record: LeaseRecord, version: str) -> str:
        body = body_of(record, self._last, datetime.now(UTC))
        body["metadata"] |= {"name": self._name, "namespace": self._namespace}
        if version == NOT_THERE:
            body["metadata"].pop("resourceVersion", None)
            written = self._call("create_namespaced_lease", body=body)
        else:
            body["metadata"]["resourceVersion"] = version
            written = self._call("replace_namespaced_lease", self._name, body=body)
        assert written is not None
        self._last = written
        new: str = written["metadata"]["resourceVersion"]
        return new

    def _call(
        self, method: str, *names: str, missing_is_none: bool = False, **arguments: Any
    ) -> Body | None:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        if self._api is None:
            self._api = self._connect()
        try:
            answer = getattr(self._api, method)(
                *names, self._namespace, _request_timeout=DEADLINE_S, **arguments
            )
        except ApiException as error:
            if error.status == 404 and missing_is_none:
                return None
            if error.status == 409:
                raise LeaseConflict(f"lease {self._name}: {error.reason}") from error
            raise LeaseUnavailable(
                f"lease {self._name}: the API answered {error.status} {error.reason}"
            ) from error
        except HTTPError as error:
            raise LeaseUnavailable(f"lease {self._name}: {error}") from error
        body: Body = self._api.api_client.sanitize_for_serialization(answer)
        return body


def _cluster_api() -> Any:
    """The API of the cluster that this pod runs in, else of the user's kubeconfig."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    loader: Any = config  # has no types
    settings = client.Configuration()
    try:
        loader.load_incluster_config(settings)
    except ConfigException:
        try:
            loader.load_kube_config(client_configuration=settings)
        except ConfigException as error:
            raise LeaseUnavailable(f"no Kubernetes API is configured: {error}") from error
    settings.retries = False  # a write that was sent twice would conflict with itself
    return client.CoordinationV1Api(client.ApiClient(settings))


def body_of(record: LeaseRecord, before: Body, now: datetime) -> Body:
    """The Lease object for a record, as a change of the one before."""
    spec = dict(before.get("spec") or {})
    metadata = dict(before.get("metadata") or {})
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    holder = f"{record.group}-{record.holder_id}"
    if spec.get("holderIdentity") != holder:
        changes = spec.get("leaseTransitions")
        spec["leaseTransitions"] = 0 if changes is None else changes + 1
        spec["acquireTime"] = stamp
    spec["holderIdentity"] = holder
    spec["leaseDurationSeconds"] = max(1, math.ceil(record.duration_s))
    spec["renewTime"] = stamp
    fields = {PREFIX + key: json.dumps(value) for key, value in asdict(record).items()}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), **fields}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": spec,
    }


def record_of(body: Body) -> LeaseRecord | None:
    """The record in a Lease object; None: somebody made the object, but nobody wrote to it yet."""
    annotations = body["metadata"].get("annotations") or {}
    ours = {k.removeprefix(PREFIX): v for k, v in annotations.items() if k.startswith(PREFIX)}
    if not ours:
        return None
    try:
        known = LeaseRecord.__dataclass_fields__
        return LeaseRecord(**{key: json.loads(text) for key, text in ours.items() if key in known})
    except (ValueError, TypeError) as error:
        name = body["metadata"].get("name")
        raise LeaseUnavailable(f"lease {name} does not read as ours: {error}") from error
