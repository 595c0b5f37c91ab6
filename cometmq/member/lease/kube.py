"""The little that a member needs of Kubernetes' API: JSON over HTTPS, with the rights of this pod.

The official client takes two seconds to import, in every process. A connection for each call: there
is one every second or two, none is found broken, and what the kubelet has replaced meanwhile (the
token, at least once an hour) is read again.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import urlsplit

from cometmq.errors import LeaseUnavailable

POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where the kubelet puts its files
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Access:
    """The API's address, the certificates to trust, and our credentials."""

    server: str  # https://host:port, or http:// for `kubectl proxy`
    authority: bytes = b""  # PEM; empty: the system's
    token: str = ""
    certificate: bytes = b""  # PEM, with its key; empty: none

    def context(self) -> ssl.SSLContext:
        """Raises ssl.SSLError, ValueError: what we were given is no certificate."""
        found = ssl.create_default_context(cadata=self.authority.decode() or None)
        if self.certificate:
            with NamedTemporaryFile() as file:  # made for our eyes only
                file.write(self.certificate)
                file.flush()
                found.load_cert_chain(file.name)
        return found


def access(environ: Mapping[str, str] = os.environ, pod: Path = POD) -> Access:
    """That of KUBECONFIG where it is set, else of the pod we run in, else of the user's kubeconfig.
    Raises OSError, ValueError, KeyError, TypeError.
    """
    host = environ.get("KUBERNETES_SERVICE_HOST")
    if "KUBECONFIG" in environ:
        return from_kubeconfig(Path(environ["KUBECONFIG"]))
    if not host:
        return from_kubeconfig(Path.home() / ".kube" / "config")
    place = f"[{host}]" if ":" in host else host
    server = f"https://{place}:{environ['KUBERNETES_SERVICE_PORT']}"
    return Access(server, (pod / "ca.crt").read_bytes(), (pod / "token").read_text().strip())


def from_kubeconfig(path: Path) -> Access:
    """The current context of a kubeconfig. Programs that fetch tokens are not asked."""
    import yaml  # here, because pods need no kubeconfig

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error

    def named(kind: str, name: str) -> Body:
        found: Body = next(e[kind] for e in config[f"{kind}s"] if e["name"] == name)
        return found

    def content(of: Body, key: str) -> bytes:
        if f"{key}-data" in of:
            return base64.b64decode(of[f"{key}-data"])
        return (path.parent / of[key]).read_bytes() if key in of else b""

    try:
        context = named("context", config["current-context"])
        cluster, user = named("cluster", context["cluster"]), named("user", context["user"])
    except StopIteration:
        raise ValueError(f"{path}: its current context is incomplete") from None
    token = user.get("token", "")
    if "tokenFile" in user:
        token = (path.parent / user["tokenFile"]).read_text().strip()
    certificate = content(user, "client-certificate") + content(user, "client-key")
    return Access(cluster["server"], content(cluster, "certificate-authority"), token, certificate)


class KubeApi:
    """Calls of the API. ``find`` gives its address and credentials, and is called before each."""

    def __init__(self, find: Callable[[], Access] = access) -> None:
        self._find = find

    def call(
        self,
        method: str,
        path: str,
        body: Any,
        timeout_s: float,
        content_type: str = "application/json",
    ) -> tuple[int, Body]:
        """Status and answer. Sent once: a write that was sent twice would conflict with itself.
        LeaseUnavailable: there is no answer, and whether the call was carried out is not known.
        """
        try:
            there = self._find()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LeaseUnavailable(f"no Kubernetes API is configured: {_reason(error)}") from error
        try:
            return _exchange(there, method, path, body, timeout_s, content_type)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LeaseUnavailable(f"the API at {there.server}: {_reason(error)}") from error


def _exchange(
    there: Access, method: str, path: str, body: Any, timeout_s: float, content_type: str
) -> tuple[int, Body]:
    server = urlsplit(there.server)
    connection: http.client.HTTPConnection
    if server.scheme == "https":
        connection = http.client.HTTPSConnection(
            server.netloc, timeout=timeout_s, context=there.context()
        )
    else:
        connection = http.client.HTTPConnection(server.netloc, timeout=timeout_s)
    headers = {"Accept": "application/json", "Content-Type": content_type}
    if there.token:
        headers["Authorization"] = f"Bearer {there.token}"
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, server.path.rstrip("/") + path, content, headers)
        answer = connection.getresponse()
        found: Body = json.loads(answer.read())
        return answer.status, found
    finally:
        connection.close()


def _reason(error: Exception) -> str:
    """With the name of its class: the text of many errors alone says little."""
    return f"{type(error).__name__}: {error}"
