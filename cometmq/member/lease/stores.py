"""Where the lease of a broker group is kept: a file, or a Lease object of Kubernetes.

Both give the same: read the record with its version, write a record if the version is still that
one. Blocking work is done in a thread, with a deadline: LeaseUnavailable means that nothing is
known, not even whether a write was done.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar
from uuid import uuid4

from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.lease.kube import Body, KubeApi
from cometmq.member.lease_place import place_of
from cometmq.replication.lease import NEEDED, LeaseRecord, record_from

T = TypeVar("T")

DEADLINE_S = 2.0  # of one reading or writing: a lease lasts long enough for several
LOCK_RETRY_S = 0.01
NOT_THERE = ""  # the version of a lease that was never written
# The advice about a lease that cannot be parsed. A live writer loses nothing by it.
MEND = "remove it while all members of the group run: the one with the longest log leads"


class Reading(NamedTuple):
    """The lease at one moment. ``record`` is None until the first one is written."""

    record: LeaseRecord | None
    version: str


class Lease(Protocol):
    """One broker group's lease. Both methods raise LeaseUnavailable."""

    async def read(self) -> Reading: ...

    async def write(self, record: LeaseRecord, version: str) -> str:
        """Write ``record`` if the version is still ``version``; the new one. LeaseConflict: it is
        not, and nothing was written.
        """


def open_lease(url: str, group: str, pod_name: str = "") -> Lease:
    """The lease at :func:`~cometmq.member.lease_place.place_of` the url. ``pod_name``: the pod of
    this process; empty: it runs in none. ConfigInvalid.
    """
    place = place_of(url)
    if isinstance(place, Path):
        return FileLease(place, group)
    return KubernetesLease(*place, group, pod_name=pod_name)


def _of_group(record: LeaseRecord | None, group: str, where: object) -> LeaseRecord | None:
    """The record, after a check that it is of ``group``. Raises LeaseUnavailable."""
    if record is not None and record.group != group:
        raise LeaseUnavailable(f"{where} is the lease of {record.group}: see the option lease")
    return record


class _OneAtATime:
    """Blocking calls, one at a time, each in a thread of its own. A disk that hangs holds one
    thread at most, and no thread of another part.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def call(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, or raises. LeaseUnavailable: its turn, or its end, has not come by
        the deadline; there is no thread for it; or an OSError.
        """
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._turn.acquire()
                return await self._begin(work)
        except TimeoutError:
            raise LeaseUnavailable(f"no answer about the lease within {DEADLINE_S:g} s") from None
        except OSError as error:
            raise LeaseUnavailable(f"the lease cannot be reached: {error}") from error

    def _begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(settle: Callable[[], None]) -> None:
            assert self._turn.locked()
            self._turn.release()
            if not answer.done():  # else its caller has given up
                settle()

        def run() -> None:
            try:
                settle = partial(answer.set_result, work())
            except Exception as error:
                settle = partial(answer.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(end, settle)

        # Not the loop's executor: what hangs there keeps a process from ending.
        thread = threading.Thread(target=run, name="lease", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._turn.release()
            raise LeaseUnavailable(f"no thread can read the lease: {error}") from error
        return answer


# --- a file ---------------------------------------------------------------------------------------


class FileLease:
    """A JSON file that is replaced as a whole, under a lock on a file beside it.

    For one machine, or a file system with working locks: development, tests, two processes.
    """

    def __init__(self, path: Path, group: str) -> None:
        self._path = path
        self._group = group
        self._lock = path.with_name(f"{path.name}.lock")
        self._calls = _OneAtATime()

    async def read(self) -> Reading:
        return await self._calls.call(self._read)

    async def write(self, record: LeaseRecord, version: str) -> str:
        return await self._calls.call(lambda: self._write(record, version))

    def _read(self) -> Reading:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            record, version = record_from(content["record"]), str(content["version"])
        except FileNotFoundError:
            return Reading(None, NOT_THERE)
        except (ValueError, KeyError, TypeError) as error:
            raise LeaseUnavailable(
                f"{self._path} does not read as a lease ({error}): {MEND}"
            ) from error
        return Reading(_of_group(record, self._group, self._path), version)

    def _write(self, record: LeaseRecord, version: str) -> str:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a") as lock:
            _take(lock)
            found = self._read().version
            if found != version:
                raise LeaseConflict(f"the lease has version {found or 'none'}, not {version}")
            new = uuid4().hex  # never one of a file that was removed meanwhile
            self._replace(json.dumps({"version": new, "record": record.fields()}, indent=2))
        return new

    def _replace(self, text: str) -> None:
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        with draft.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # else the lease as it was before may come back with the power
        finally:
            os.close(folder)


def _take(lock: IO[str]) -> None:
    """Lock the file. BlockingIOError: another process holds it past the deadline. A thread that
    waits for ever would keep the turn from all later calls.
    """
    for _ in range(round(DEADLINE_S / LOCK_RETRY_S)):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        threading.Event().wait(LOCK_RETRY_S)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- Kubernetes -----------------------------------------------------------------------------------

PREFIX = "cometmq.io/"


class KubernetesLease:
    """``coordination.k8s.io/v1`` Lease: the standard fields for people and tools, all of the record
    in annotations. Members read the annotations alone: ``holderIdentity`` may name the writer's pod
    or, as a release before wrote it, the group and the member id.

    A version is ``uid/resourceVersion``. Without the uid the API would take the replacement of a
    deleted Lease for its creation.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        group: str,
        api: KubeApi | None = None,
        pod_name: str = "",
    ) -> None:
        self._group = group
        self._pod_name = pod_name
        self._place = {"namespace": namespace, "name": name}
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._one = f"{self._all}/{name}"
        self._api = api or KubeApi()
        self._calls = _OneAtATime()
        self._last: Body = {}  # as read or written last: labels and owners stay as they are

    async def read(self) -> Reading:
        return await self._calls.call(self._read)

    async def write(self, record: LeaseRecord, version: str) -> str:
        return await self._calls.call(lambda: self._write(record, version))

    def _read(self) -> Reading:
        status, found = self._api.call("GET", self._one, None, DEADLINE_S)
        if status == HTTPStatus.NOT_FOUND and _names(found) == self._place["name"]:
            self._last = {}
            return Reading(None, NOT_THERE)
        self._last = self._checked(status, found)
        record = _of_group(record_of(found), self._group, f"lease {self._place['name']}")
        return Reading(record, _version_of(found))

    def _write(self, record: LeaseRecord, version: str) -> str:
        body = body_of(record, self._last, datetime.now(UTC), self._pod_name)
        uid, _, number = version.partition("/")
        known = {"uid": uid, "resourceVersion": number} if version != NOT_THERE else {}
        fields = {name: value for name, value in body["metadata"].items() if name not in _VERSION}
        body["metadata"] = {**fields, **self._place, **known}
        method, path = ("PUT", self._one) if known else ("POST", self._all)
        self._last = self._checked(*self._api.call(method, path, body, DEADLINE_S))
        return _version_of(self._last)

    def _checked(self, status: int, body: Body) -> Body:
        """The Lease in an answer that has one."""
        if status in (HTTPStatus.OK, HTTPStatus.CREATED):
            return body
        refusal = (
            f"lease {self._place['name']}: the API answered {status} {body.get('message', '')}"
        )
        if status == HTTPStatus.CONFLICT:
            raise LeaseConflict(refusal)
        raise LeaseUnavailable(refusal)


_VERSION = ("uid", "resourceVersion", "creationTimestamp", "managedFields")


def _names(refusal: Body) -> str | None:
    """What an answer says was not found. Nothing: there is not even the kind, as while the server
    starts, or it is no API of Kubernetes.
    """
    found: str | None = (refusal.get("details") or {}).get("name")
    return found


def _version_of(body: Body) -> str:
    return f"{body['metadata']['uid']}/{body['metadata']['resourceVersion']}"


def body_of(record: LeaseRecord, before: Body, now: datetime, pod_name: str = "") -> Body:
    """The Lease object for a record, as a change of the one before. The holder writes it, in the
    pod of that name; empty: in none.
    """
    spec = dict(before.get("spec") or {})
    metadata = dict(before.get("metadata") or {})
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    holder = pod_name or f"{record.group}-{record.holder_id}"
    if not _is_held(before, record, holder):
        changes = spec.get("leaseTransitions")
        spec["leaseTransitions"] = 0 if changes is None else changes + 1
        spec["acquireTime"] = stamp
    spec["holderIdentity"] = holder
    spec["leaseDurationSeconds"] = max(1, math.ceil(record.duration_s))
    spec["renewTime"] = stamp
    fields = {PREFIX + key: json.dumps(value) for key, value in record.fields().items()}
    # Fields that only another release knows are dropped, as from a file: this record has none.
    notes = (metadata.get("annotations") or {}).items()
    others = {key: text for key, text in notes if not key.startswith(PREFIX)}
    metadata["annotations"] = {**others, **fields}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": spec,
    }


def _is_held(body: Body, record: LeaseRecord, holder: str) -> bool:
    """Whether the member of ``record`` holds the Lease already, by whatever name it is called."""
    annotations = (body.get("metadata") or {}).get("annotations") or {}
    found = annotations.get(f"{PREFIX}holder_id")
    if found is None:
        return bool((body.get("spec") or {}).get("holderIdentity") == holder)
    return bool(found == json.dumps(record.holder_id))


def record_of(body: Body) -> LeaseRecord | None:
    """The record in a Lease object; None: the object exists, and no member wrote to it yet."""
    annotations = body["metadata"].get("annotations") or {}
    ours = {k.removeprefix(PREFIX): v for k, v in annotations.items() if k.startswith(PREFIX)}
    if not ours:
        return None
    try:
        return record_from({key: _value(key, text) for key, text in ours.items()})
    except (ValueError, TypeError) as error:
        name = body["metadata"].get("name")
        raise LeaseUnavailable(f"lease {name} does not read as ours ({error}): {MEND}") from error


def _value(key: str, text: str) -> Any:
    """The value of a field; None: it does not parse, and is not needed. Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError:
        if key in NEEDED:
            raise
        return None
