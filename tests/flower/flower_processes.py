"""Flower's own programs, in a home of their own, and none of them left behind."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

FLWR_BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(home: Path) -> dict[str, str]:
    """Offline, and away from the Flower that the user of this machine may run."""
    return {
        **os.environ,
        "PATH": f"{FLWR_BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        # What a test has on its path, such as pytest's own modules, is not the app's.
        "PYTHONPATH": "",
    }


@contextlib.contextmanager
def flower_home(home: Path) -> Iterator[dict[str, str]]:
    """The environment for programs of Flower; whatever was started with it is killed at the end."""
    home.mkdir(parents=True, exist_ok=True)
    try:
        yield environment(home)
    finally:
        for _ in range(100):
            pids = list(processes_of(home))
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_of(home: Path) -> Iterator[int]:
    """Living processes that were started with this home."""
    mark = f"FLWR_HOME={home}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if mark in variables and state != "Z" and int(folder.name) != os.getpid():
                yield int(folder.name)


def flwr(env: dict[str, str], *arguments: str, cwd: Path, timeout_s: float) -> str:
    """What the command `flwr` says. It may fail: what it says then is what counts."""
    done = subprocess.run(
        [str(FLWR_BIN / "flwr"), *arguments],
        env=env,
        cwd=cwd,
        timeout=timeout_s,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


class Deployment:
    """A SuperLink and SuperNodes of this machine, with TLS and node authentication."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.env = env
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        _make_certificates(folder)
        (Path(env["FLWR_HOME"]) / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{self.address}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def start_superlink(self) -> None:
        host, port = self.address.split(":")
        self._start(
            "superlink",
            *("flower-superlink", "--host", host, "--port", port, "--enable-supernode-auth"),
            *("--ssl-ca-certfile", str(self.folder / "ca.crt")),
            *("--ssl-certfile", str(self.folder / "server.crt")),
            *("--ssl-keyfile", str(self.folder / "server.key")),
            *("--database", str(self.folder / "superlink.db")),
        )
        wait_until(lambda: _answers(self.address), 120.0, "the SuperLink listens")

    def register(self, number: int) -> None:
        key = ec.generate_private_key(ec.SECP384R1())
        (self.folder / f"node{number}").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.OpenSSH,
                serialization.NoEncryption(),
            )
        )
        public = self.folder / f"node{number}.pub"
        public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            )
        )
        said = flwr(
            self.env, "supernode", "register", str(public), "here", cwd=self.folder, timeout_s=120
        )
        assert "egistered" in said, said

    def start_supernode(
        self, number: int, of: int, node_config: str = "", superlink: str | None = None
    ) -> None:
        """`superlink`: where it dials, if that is not the SuperLink itself."""
        is_told = "peer-address" in node_config or "peer-relayed" in node_config
        address = "" if is_told else 'peer-address="127.0.0.1:0"'
        self._start(
            f"supernode{number}",
            *("flower-supernode", "--superlink", superlink or self.address),
            *("--root-certificates", str(self.folder / "ca.crt")),
            *("--auth-supernode-private-key", str(self.folder / f"node{number}")),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            "--node-config",
            f"partition-id={number} num-partitions={of} {address} {node_config}",
        )

    def supernodes(self) -> str:
        """What Flower says of them all."""
        arguments = ("supernode", "list", "here", "--format", "json")
        return flwr(self.env, *arguments, cwd=self.folder, timeout_s=120)

    def kill(self, name: str) -> None:
        """SIGKILL to a program and to what it has started, but not to peers, who are detached."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    def run(self, app: Path, config: str, timeout_s: float = 900) -> str:
        """What `flwr run --stream` says."""
        arguments = ("run", str(app), "here", "--stream", "-c", config)
        return flwr(self.env, *arguments, cwd=self.folder, timeout_s=timeout_s)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(FLWR_BIN / program), *arguments],
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    """Poll, because other programs tell nobody; the cap is far above what is usual."""
    ends_at = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends_at, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.2)


def _answers(address: str) -> bool:
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
        return True
    return False


def _make_certificates(folder: Path) -> None:
    """An authority and a certificate for 127.0.0.1, as an operator makes them with openssl."""
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
        )

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        builder("authority", ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    server = (
        builder("superlink", key)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    (folder / "server.crt").write_bytes(server.public_bytes(pem) + ca.public_bytes(pem))
    (folder / "server.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
