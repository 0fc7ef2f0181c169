import pytest

from pollux.errors import InvalidSpec
from pollux.service.auth import is_loopback
from pollux.service.options import ServiceOptions
from pollux.service.rest import create_app
from pollux.service.routes import ROUTES
from pollux.wire.credentials import ReplicaIdentity, credential, key_of

from .fake_service import TOKEN, FakeService
from .rest_client import BEARER, ask

HEALTH = "/v1/health"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_but_health_needs_the_token(route):
    path = route.path.replace("{", "").replace("}", "")
    answer = ask(FakeService(), route.method, path, headers={})
    if route.name == "health":
        assert answer.status_code == 200
        return
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="pollux"'
    assert answer.headers["content-type"] == "application/problem+json"


def test_without_a_token_not_even_the_paths_are_told():
    assert ask(FakeService(), "GET", "/v1/nothing", headers={}).status_code == 401
    assert ask(FakeService(), "GET", "/v1/nothing").status_code == 404


@pytest.mark.parametrize(
    "value",
    [TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", "Bearer é", f"Bearer,{TOKEN}"],
)
def test_a_wrong_token_is_refused_and_not_repeated(value):
    answer = ask(FakeService(), "GET", "/v1/cluster", headers={"Authorization": value.encode("latin-1")})
    assert answer.status_code == 401
    assert TOKEN not in answer.text


MINE = ReplicaIdentity("j-1", "1-0")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_the_credential_of_a_replica_is_good_for_no_route(route):
    path = route.path.replace("{", "").replace("}", "")
    bearer = f"Bearer {credential(TOKEN, MINE)}"
    answer = ask(FakeService(), route.method, path, headers={"Authorization": bearer})
    assert answer.status_code == 403
    assert "replica 1-0 of job j-1" in answer.json()["detail"]
    assert key_of(TOKEN, MINE) not in answer.text


@pytest.mark.parametrize(
    "forged",
    [
        credential("another token", MINE),
        credential(TOKEN, MINE).replace("j-1", "j-2"),
        f"pollux-replica:j-1/1-0:{TOKEN}",
        "pollux-replica:é",
        key_of(TOKEN, MINE),
    ],
)
def test_a_forged_credential_is_a_wrong_token(forged):
    headers = {"Authorization": f"Bearer {forged}".encode("latin-1")}
    assert ask(FakeService(), "GET", "/v1/cluster", headers=headers).status_code == 401
    assert ask(FakeService(), "GET", HEALTH, headers=headers).status_code == 200


def test_a_token_that_looks_like_a_credential_is_refused_at_the_start():
    with pytest.raises(InvalidSpec, match="credential of a job"):
        create_app(FakeService(), credential(TOKEN, MINE))


def test_two_tokens_are_none():
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")]
    assert ask(FakeService(), "GET", "/v1/cluster", headers=headers).status_code == 401


def test_the_scheme_is_known_in_any_case():
    assert ask(FakeService(), "GET", "/v1/cluster", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:7333", "127.0.0.1:1", "[::1]", "[::1]:7333"])
def test_loopback_has_several_names(host):
    assert ask(FakeService(), "GET", HEALTH, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7333", "127.0.0.1.evil.example", "", "[::1]evil", "[::2]"]
)
def test_a_page_that_calls_loopback_by_a_name_of_its_own_is_refused(host):
    answer = ask(FakeService(), "GET", HEALTH, headers={**BEARER, "Host": host})
    assert answer.status_code == 421
    assert answer.json()["status"] == 421


def test_the_configured_host_is_a_name_of_loopback_too(tmp_path):
    service = FakeService(options=ServiceOptions(tmp_path, host="127.0.0.5", policy="fifo"))
    assert ask(service, "GET", HEALTH, headers={"Host": "127.0.0.5:7333"}).status_code == 200
    assert ask(service, "GET", HEALTH, headers={"Host": "evil.example"}).status_code == 421


def test_a_service_for_other_machines_has_names_that_nobody_can_list(tmp_path):
    service = FakeService(options=ServiceOptions(tmp_path, host="0.0.0.0", policy="fifo"))
    assert ask(service, "GET", HEALTH, headers={"Host": "gpu-box.example"}).status_code == 200
    assert ask(service, "GET", "/v1/cluster", headers={"Host": "gpu-box.example"}).status_code == 401


@pytest.mark.parametrize(("method", "path"), [("GET", HEALTH), ("GET", "/v1/nothing"), ("DELETE", "/v1/jobs")])
def test_no_answer_is_kept_or_guessed_at(method, path):
    headers = ask(FakeService(), method, path).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_a_browser_gets_no_leave_to_ask_from_elsewhere():
    headers = {**BEARER, "Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = ask(FakeService(), "OPTIONS", "/v1/jobs", headers=headers)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("token", ["", "two words", "é", "line\n"])
def test_a_token_that_no_header_can_hold_is_refused_without_being_told(token):
    with pytest.raises(InvalidSpec) as caught:
        create_app(FakeService(), token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_it"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False)]
)
def test_loopback_is_known(host, is_it):
    assert is_loopback(host) is is_it
