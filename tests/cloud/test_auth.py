"""Credentials for the real service, created offline; an endpoint needs none."""

from __future__ import annotations

import json
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer

import google.auth
import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth._cloud_sdk import CLOUD_SDK_CLIENT_ID
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError
from google.auth.transport.grpc import AuthMetadataPlugin
from google.auth.transport.requests import Request
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from google.oauth2 import credentials as users
from google.oauth2 import service_account

from tpu_ops.cloud import auth, client
from tpu_ops.cloud.auth import Auth, credentials
from tpu_ops.cloud.client import ApiError
from tpu_ops.cloud.listing import list_nodes
from tpu_ops.errors import CloudError

SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@pytest.fixture(scope="module")
def key():
    """The key of a service account that nobody has."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "project_id": "grant",
        "private_key_id": "void",
        "private_key": private.decode(),
        "client_email": "training@grant.iam.gserviceaccount.com",
        "token_uri": "https://oauth2.invalid/token",
    }


@pytest.mark.parametrize("place", ["file", "contents"])
def test_a_service_account_signs_with_its_key_for_all_of_google_cloud(key, tmp_path, place):
    file = tmp_path / "key.json"
    file.write_text(json.dumps(key))
    named = Auth("serviceaccount", file) if place == "file" else Auth("serviceaccount", None, json.dumps(key))
    found = credentials(named)
    assert isinstance(found, service_account.Credentials)
    assert (found.service_account_email, found.scopes) == (key["client_email"], (SCOPE,))
    assert len(found.signer.sign(b"x")) == 256


def test_contents_win_over_the_file(key, tmp_path):
    assert credentials(Auth("serviceaccount", tmp_path / "none", json.dumps(key))).valid is False


def test_an_access_token_is_used_as_it_is():
    found = credentials(Auth("accesstoken", access_token="ya29.void"))
    assert isinstance(found, users.Credentials)
    assert (found.token, found.valid, found.refresh_token) == ("ya29.void", True, None)


def test_application_default_credentials_are_asked_for_the_same_scope(monkeypatch):
    found = {(SCOPE,): (AnonymousCredentials(), "grant")}
    monkeypatch.setattr(google.auth, "default", lambda scopes: found[scopes])
    assert credentials(Auth()) is found[SCOPE,][0]


def test_a_login_without_a_quota_project_is_used_without_a_word(monkeypatch, tmp_path, recwarn):
    """The API may accept it; otherwise the API's error says so."""
    file = tmp_path / "adc.json"
    login = {"client_id": CLOUD_SDK_CLIENT_ID, "client_secret": "void", "refresh_token": "void"}
    file.write_text(json.dumps({"type": "authorized_user", **login}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    assert isinstance(credentials(Auth()), users.Credentials)
    assert [str(warning.message) for warning in recwarn] == []


def test_missing_default_credentials_name_the_reason_and_alternatives(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(CloudError, match=r"none\.json was not found") as caught:
        credentials(Auth())
    assert isinstance(caught.value.__cause__, DefaultCredentialsError)
    for words in ("gcloud auth application-default login", "TPU_OPS_ENDPOINT", "refresh --from"):
        assert words in caught.value.fix


def damaged(key):
    """Ways in which a key's text can be none, each with what must not be shown."""
    private = key["private_key"].splitlines()[5]
    return {
        "no JSON": (f"-----BEGIN {private}", private),
        "cut off": (json.dumps(key)[:-200], private),
        "a list": (json.dumps([private]), private),
        "a text": (json.dumps(private), private),
        "without an address": (
            json.dumps({name: text for name, text in key.items() if name != "client_email"}),
            private,
        ),
        "a damaged private key": (json.dumps({**key, "private_key": key["private_key"][:300]}), private),
        "a private key of a wrong type": (json.dumps({**key, "private_key": [private]}), private),
        "a user's credentials": (json.dumps({"type": "authorized_user", "refresh_token": private}), private),
        "nested": ("[" * 100_000, "[[["),
        "blank": (" ", "-----"),
    }


@pytest.mark.parametrize("how", sorted(damaged({"private_key": "x\n" * 9})))
@pytest.mark.parametrize("place", ["file", "contents"])
def test_a_damaged_key_is_named_by_its_place_and_never_quoted(key, tmp_path, how, place):
    text, secret = damaged(key)[how]
    file = tmp_path / "key.json"
    file.write_text(text)
    with pytest.raises(CloudError, match="not a key of a service account") as caught:
        credentials(Auth("serviceaccount", file) if place == "file" else Auth("serviceaccount", None, text))
    assert caught.value.where == (str(file) if place == "file" else "service_account_contents")
    assert caught.value.__suppress_context__
    assert secret not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '"x"',
        "5",
        "null",
        '{"type": "impersonated_service_account"}',
        '{"type": "external_account", "credential_source": [1]}',
        '{"type": "external_account", "audience": 5}',
        "[" * 100_000,
    ],
)
def test_invalid_default_credentials_are_an_error_that_names_the_file(tmp_path, monkeypatch, text):
    file = tmp_path / "c.json"
    file.write_text(text)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(CloudError, match="no credentials for Google Cloud: the file does not") as caught:
        credentials(Auth())
    assert caught.value.where == f"{file} (from GOOGLE_APPLICATION_CREDENTIALS)"


def test_default_credentials_that_are_a_directory_name_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    with pytest.raises(CloudError, match="Is a directory") as caught:
        credentials(Auth())
    assert caught.value.where == f"{tmp_path} (from GOOGLE_APPLICATION_CREDENTIALS)"


def test_a_key_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(CloudError, match="No such file") as caught:
        credentials(Auth("serviceaccount", tmp_path / "none.json"))
    assert caught.value.where == str(tmp_path / "none.json")
    assert "GCP_SERVICE_ACCOUNT_FILE" in caught.value.fix


def test_the_printed_form_has_no_secrets():
    text = repr(Auth("accesstoken", None, "the-key", "the-token"))
    assert "accesstoken" in text
    assert "the-" not in text


def test_the_real_service_gets_the_credentials_that_are_named(monkeypatch):
    asked = []

    def credentials_of(named):
        asked.append(named)
        return AnonymousCredentials()

    monkeypatch.setattr(client, "credentials", credentials_of)
    named = Auth("accesstoken", access_token="ya29.void")
    with client.connect(auth=named) as tpu:
        assert tpu.endpoint == client.REAL_SERVICE
    with client.connect():
        assert asked == [named, Auth()]


@pytest.fixture
def plaintext():
    """A plaintext server that knows no nodes, and the headers of the requests that it had."""
    headers = []

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc ships no types
        def service(self, details):
            headers.append(dict(details.invocation_metadata))
            answer = tpu_v2.ListNodesResponse.serialize(tpu_v2.ListNodesResponse())
            return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", headers
    server.stop(None).wait()


def test_an_endpoint_is_asked_without_credentials_and_none_are_looked_for(plaintext, monkeypatch):
    endpoint, headers = plaintext

    def looked_for(*args, **kwargs):
        raise AssertionError("credentials were looked for")

    monkeypatch.setattr(google.auth, "default", looked_for)
    monkeypatch.setattr(auth, "_service_account", looked_for)
    monkeypatch.setattr(client, "credentials", looked_for)
    for named in (None, Auth(), Auth("accesstoken", access_token="ya29.void"), Auth("serviceaccount")):
        with client.connect(endpoint, timeout=10, auth=named) as tpu:
            assert list_nodes(tpu, ["grant"]).nodes == ()
    assert len(headers) == 4
    assert not {name.lower() for header in headers for name in header} & {"authorization", "x-goog-user-project"}
    assert "ya29" not in str(headers)


#: What a token endpoint says to credentials that were good once; it closes the connection where it says nothing.
REVOKED = {"error": "invalid_grant", "error_description": "Token has been expired or revoked."}
STALE = {"error": "invalid_grant", "error_subtype": "invalid_rapt"}
SILENCE: dict[str, str] = {}


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """What lists nodes with credentials whose token endpoint gives these answers, and those that are left then."""
    monkeypatch.setattr(client, "FIRST_DELAY", 0.01)
    answers: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            if answer := answers.pop(0):
                content = json.dumps(answer).encode()
                self.send_response(400)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *words):
            pass

    # Only a connection that nobody else can read is given a token; a local socket is one without certificates.
    local = grpc.LocalConnectionType.UDS
    service = grpc.server(futures.ThreadPoolExecutor(1))
    service.add_secure_port(f"unix:{tmp_path}/tpu", grpc.local_server_credentials(local))
    service.start()
    tokens = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=tokens.serve_forever)
    thread.start()

    def ask(*given):
        answers[:] = given
        where = f"http://127.0.0.1:{tokens.server_port}/token"
        mine = users.Credentials(None, refresh_token="old", token_uri=where, client_id="me", client_secret="mine")
        plugin = grpc.metadata_call_credentials(AuthMetadataPlugin(mine, Request()))
        secure = grpc.composite_channel_credentials(grpc.local_channel_credentials(local), plugin)
        channel = grpc.secure_channel(f"unix:{tmp_path}/tpu", secure)
        wire = tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=channel))
        tpu = client.Tpu(wire, client.REAL_SERVICE, 10, threading.Event())
        try:
            list_nodes(tpu, ["grant"])
        finally:
            tpu.close()

    yield ask, answers
    tokens.shutdown()
    thread.join()
    tokens.server_close()
    service.stop(None).wait()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (REVOKED, r"no access: invalid_grant: Token has been expired or revoked\. \(log in"),
        (STALE, "Reauthentication is needed"),
    ],
)
def test_expired_credentials_fail_at_once_and_say_to_log_in_again(ask, answer, words):
    list_, left = ask
    with pytest.raises(ApiError, match=words) as caught:
        list_(answer, answer)
    assert (caught.value.status, left) == ("UNAUTHENTICATED", [answer])
    assert "gcloud auth application-default login" in caught.value.fix


def test_a_token_endpoint_that_does_not_answer_is_asked_again(ask):
    list_, left = ask
    with pytest.raises(ApiError) as caught:
        list_(SILENCE, SILENCE, REVOKED)
    assert (caught.value.status, left) == ("UNAUTHENTICATED", [])
