"""The file and the client of Kubernetes, the latter with a model of its API, through one contract.

tests/kube plays the same contract on a real API server.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from stat import S_ISDIR

import pytest

from cometmq.errors import ConfigInvalid, LeaseUnavailable
from cometmq.member.lease import stores
from cometmq.member.lease.kube import Access, KubeApi
from cometmq.member.lease.stores import NOT_THERE, FileLease, KubernetesLease, open_lease
from tests.support.cluster.lease_contract import HELD, Body, KubernetesContract, LeaseContract
from tests.support.kube.lease_api import LeaseApi, lease_api

KEY = ("spaces", "broker-g1")


# --- a file ---------------------------------------------------------------------------------------


class FileKeeper:
    """A folder with the file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "g1.json"

    def open(self) -> FileLease:
        return FileLease(self._path, "g1")

    def delete(self) -> None:
        self._path.unlink()

    def spoil(self) -> None:
        self._path.write_text("{")

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Rights do not stop root; a folder of the file's name stops everybody."""
        with _aside(self._path):
            self._path.mkdir()
            yield
            self._path.rmdir()

    @contextmanager
    def away(self) -> Iterator[None]:
        with _aside(self._folder):
            self._folder.touch()
            yield
            self._folder.unlink()

    @contextmanager
    def stuck(self) -> Iterator[None]:
        """Somebody holds the lock; of this place only writers notice."""
        with (self._folder / "g1.json.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextmanager
def _aside(path: Path) -> Iterator[None]:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    yield
    elsewhere.rename(path)


class TestFile(LeaseContract):
    @pytest.fixture
    def keeper(self, tmp_path: Path) -> FileKeeper:
        return FileKeeper(tmp_path / "leases")


async def test_a_file_that_is_no_lease(tmp_path: Path) -> None:
    path = tmp_path / "g1.json"
    lease = FileLease(path, "g1")
    for content in ("", "{", "[]", '{"version": 1}', '{"version": 1, "record": {"group": 1}}'):
        path.write_text(content)
        with pytest.raises(LeaseUnavailable, match=r"g1\.json .*remove it"):
            await lease.read()


async def test_the_file_is_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "g1.json"
    version = await FileLease(path, "g1").write(HELD, NOT_THERE)
    content = json.loads(path.read_text())
    assert content["version"] == version
    assert content["record"]["holder_store_id"] == "store-0"


async def test_a_thread_waits_no_longer_for_the_lock_than_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ends a process that has a thread which waits for ever."""
    monkeypatch.setattr(stores, "DEADLINE_S", 0.02)
    with (tmp_path / "g1.json.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            FileLease(tmp_path / "g1.json", "g1")._write(HELD, NOT_THERE)


async def test_what_was_written_outlives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(S_ISDIR(os.fstat(fd).st_mode)))
    await FileLease(tmp_path / "g1.json", "g1").write(HELD, NOT_THERE)
    assert synced == [False, True], "the file, then its name"


# --- Kubernetes -----------------------------------------------------------------------------------


class ModelKeeper:
    """The model of the API."""

    def __init__(self, api: LeaseApi) -> None:
        self._api = api
        self._address = api.address

    def open(self, pod_name: str = "") -> KubernetesLease:
        api = KubeApi(lambda: Access(self._address))
        return KubernetesLease(*KEY, "g1", api, pod_name)

    def delete(self) -> None:
        del self._api.leases[KEY]

    def object(self) -> Body:
        found: Body = json.loads(json.dumps(self._api.leases[KEY]))
        return found

    def put(self, body: Body) -> None:
        status, _ = self._api.put(KEY, body, new="uid" not in body["metadata"])
        assert status in (200, 201)

    def spoil(self) -> None:
        body = self.object()
        body["metadata"]["annotations"]["cometmq.io/epoch"] = "{"
        self.put(body)

    def refusing(self) -> AbstractContextManager[None]:
        return self.failing(403)

    def unknown(self) -> AbstractContextManager[None]:
        return self.failing(401)

    @contextmanager
    def failing(self, status: int) -> Iterator[None]:
        self._api.failing = status
        yield
        self._api.failing = 0

    @contextmanager
    def away(self) -> Iterator[None]:
        """At its address nobody listens."""
        with lease_api() as another:
            self._address = another.address
        yield
        self._address = self._api.address

    @contextmanager
    def stuck(self) -> Iterator[None]:
        self._api.gate.clear()
        yield
        self._api.gate.set()

    @contextmanager
    def losing_answers(self) -> Iterator[None]:
        calls = len(self._api.calls)
        self._api.lose_answers = 1
        yield
        assert self._api.calls[calls:] == ["PUT"], "sent once: a second would find a conflict"


class TestModel(KubernetesContract):
    @pytest.fixture
    def keeper(self) -> Iterator[ModelKeeper]:
        with lease_api() as api:
            yield ModelKeeper(api)

    @pytest.mark.parametrize("status", [404, 429, 500, 503])
    async def test_an_api_that_fails(self, keeper: ModelKeeper, status: int) -> None:
        with keeper.failing(status), pytest.raises(LeaseUnavailable, match=str(status)):
            await keeper.open().read()


async def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(LeaseUnavailable, match="no Kubernetes API is configured"):
        await open_lease("kubernetes://spaces/broker-g1", "g1").read()


# --- addresses ------------------------------------------------------------------------------------


def test_where_a_lease_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "with blanks" / "g1.json"
    assert isinstance(open_lease(path.as_uri(), "g1"), FileLease)
    assert isinstance(open_lease("kubernetes://spaces/broker-g1", "g1"), KubernetesLease)


@pytest.mark.parametrize(
    "url",
    [
        *("", "g1.json", "http://a/b"),
        *("file://", "file://host/path", "file:///", "file:///tmp", "file:///not/there/"),
        *("kubernetes://only", "kubernetes://spaces/broker/g1"),
    ],
)
def test_what_is_no_address_of_a_lease(url: str) -> None:
    with pytest.raises(ConfigInvalid, match="lease"):
        open_lease(url, "g1")
