"""TLS and the token, from Python: a server that only those may use who trust it and know its secret."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from serving import until
from steps import VIEW, fill, table

import innet_drl as innet
from innet_drl import errors

TOKEN = "secret of the tests"


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """The PEM file of the authority that the server's certificate is from."""
    return tmp_path / "authority.pem"


def write_certificate(folder: Path, made: trustme.CA, host: str, **dates: Any) -> tuple[Path, Path]:
    """Paths of a new certificate of an authority, and of its key."""
    certificate = made.issue_cert(host, **dates)
    folder.mkdir(exist_ok=True)
    chain, key = folder / "chain.pem", folder / "key.pem"
    certificate.private_key_pem.write_to_path(str(key))
    for one in certificate.cert_chain_pems:
        one.write_to_path(str(chain), append=True)
    return chain, key


@pytest.fixture
def address(tmp_path: Path, authority: Path) -> Iterator[str]:
    """A server with TLS and a token."""
    made = trustme.CA()
    made.cert_pem.write_to_path(str(authority))
    chain, key = write_certificate(tmp_path, made, "127.0.0.1")
    with (
        innet.Memory([table()]) as memory,
        memory.serve("innets://127.0.0.1:0", token=TOKEN, tls_cert=chain, tls_key=key) as server,
    ):
        yield server.addresses[0]


def test_who_trusts_the_server_and_knows_the_token_is_served(address: str, authority: Path) -> None:
    assert address.startswith("innets://")
    with innet.connect(address, tls_ca=authority, token=TOKEN) as replay:
        fill(replay, 20)
        assert len(replay.sample("t", 4, VIEW, timeout=10)) == 4


@pytest.mark.parametrize(
    ("host", "until_year", "reason"),
    [
        ("127.0.0.1", 2001, "expired"),
        ("replay.example", 2100, "not valid for name"),
        ("replay.example", 2001, "expired|not valid for name"),
    ],
)
def test_dates_and_host_of_a_certificate_count_unless_the_client_has_it_itself(
    tmp_path: Path, authority: Path, host: str, until_year: int, reason: str
) -> None:
    made = trustme.CA()
    made.cert_pem.write_to_path(str(authority))
    dates = {"not_before": datetime(2000, 1, 1, tzinfo=UTC), "not_after": datetime(until_year, 1, 1, tzinfo=UTC)}
    own, key = write_certificate(tmp_path / "own", made, host, **dates)
    other, _ = write_certificate(tmp_path / "other", made, host, **dates)
    with (
        innet.Memory([table()]) as memory,
        memory.serve("innets://127.0.0.1:0", token=TOKEN, tls_cert=own, tls_key=key) as server,
    ):
        (address,) = server.addresses
        with innet.connect(address, tls_ca=own, token=TOKEN) as replay:
            fill(replay, 20)
            assert len(replay.sample("t", 4, VIEW, timeout=10)) == 4
            for trusted, why in ((authority, reason), (other, "")):
                with pytest.raises(errors.AuthenticationError, match=f"TLS with .* failed.*({why})"):
                    innet.connect(address, tls_ca=trusted, token=TOKEN)
            until(lambda: replay.stats()["server"]["failed_logins"] == 2)


@pytest.mark.parametrize("token", ["some other secret", None])
def test_a_wrong_token_is_refused(address: str, authority: Path, token: str | None) -> None:
    with pytest.raises(errors.AuthenticationError, match="token"):
        innet.connect(address, tls_ca=authority, token=token)


def test_a_server_of_another_authority_is_not_trusted(address: str, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    with pytest.raises(errors.AuthenticationError, match=r"TLS with .* failed"):
        innet.connect(address, tls_ca=other, token=TOKEN)
    with pytest.raises(errors.ConfigError, match="needs tls_ca"):
        innet.connect(address, token=TOKEN)


def test_tls_before_1_3_is_refused_at_both_ends(address: str, authority: Path, tmp_path: Path) -> None:
    host, port = address.removeprefix("innets://").split(":")
    old = ssl.create_default_context(cafile=str(authority))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((host, int(port)), timeout=60) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain, server_hostname=host)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            accepted, _ = listener.accept()
            with accepted, pytest.raises(ssl.SSLError):
                server.wrap_socket(accepted, server_side=True)

        with ThreadPoolExecutor() as pool:
            accepting = pool.submit(accept)
            with pytest.raises(errors.AuthenticationError, match=r"TLS with .* failed"):
                innet.connect(f"innets://127.0.0.1:{listener.getsockname()[1]}", tls_ca=authority, token=TOKEN)
            accepting.result()


def test_a_broken_handshake_of_tls_says_what_may_break_it(authority: Path, address: str) -> None:
    hint = (
        "; is it an innet-replay server? (a server that restarts or is at a limit, max_handshakes or "
        "max_handshakes_per_address, closes connections like this, too)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:

        def accept() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(4096)

        accepting = pool.submit(accept)
        with pytest.raises(errors.DisconnectedError) as refused:
            innet.connect(f"innets://127.0.0.1:{listener.getsockname()[1]}", tls_ca=authority, token=TOKEN, timeout=0)
        accepting.result()
    assert str(refused.value).endswith(hint), refused.value


def test_a_client_without_tls_is_told_of_it(address: str) -> None:
    with pytest.raises(errors.ReplayError, match="innets://"):
        innet.connect(address.replace("innets", "innet"), token=TOKEN)


def test_a_failed_handshake_of_tls_is_a_failed_login(address: str, authority: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    with innet.connect(address, tls_ca=authority, token=TOKEN) as replay:

        def failed() -> int:
            return int(replay.stats()["server"]["failed_logins"])

        assert failed() == 0
        with pytest.raises(errors.AuthenticationError, match=r"TLS with .* failed"):
            innet.connect(address, tls_ca=other, token=TOKEN)
        until(lambda: failed() == 1)
        host, port = address.removeprefix("innets://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as plain:
            plain.sendall(bytes(64))
            until(lambda: failed() == 2)
        innet.connect(address, tls_ca=authority, token=TOKEN).close()
        assert failed() == 2
        with pytest.raises(errors.ConfigError, match="innets://"):
            innet.connect(address.replace("innets", "innet"), token=TOKEN)
        until(lambda: failed() == 3)
