"""Redaction finds secrets in every spelling and keeps all other text."""

import base64
import errno
import io
import json
import os
import sys
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.redaction import HIDDEN, print_exception, redact, redact_stderr, write_stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "abcdef"), ("WANDB_API_KEY", "0123456789abcdef"), ("AWS_SECRET_ACCESS_KEY", "/JalrXUtnFEMI/K7MD"),
        ("AWS_ACCESS_KEY_ID", "PLAIN0ACCESS0ID"), ("MLFLOW_TRACKING_PASSWORD", "correct horse battery"),
        ("MYSQL_PWD", "s3cr3t-pwd"), ("GITHUB_PAT", "pat-123456"), ("RATCHET_WEBHOOK_URL", "https://hooks.example/a/b"),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;x"), ("AZURE_STORAGE_SAS", "sv=2024&x9"),
        ("APIKEY", "q1w2e3r4"), ("DB_PASS", "hunter2!"), ("GOOGLE_CREDENTIALS_JSON", '{"a": "b\\n9"}'),
        ("PGPASSWORD", 'quo"ted\\slash'), ("SECRET_OF_THE_TEAM", "lettersonly"), ("SSH_KEY", "line one of it\nxyz"),
        ("MY_TOKEN", "schlüssel-9"), ("NPM_AUTH", "bm9uZTp4eA=="),
    ],
    ids=lambda text: text if text.isupper() and " " not in text else "",
)  # fmt: skip
def test_values_of_secret_variables_are_hidden_in_every_spelling(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    encoded = base64.b64encode(value.encode()).decode()
    ways = [
        value, quote(value), quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1], encoded,
        json.dumps(value, ensure_ascii=False)[1:-1],
    ]  # fmt: skip
    for way in ways:
        assert way not in redact(f"before {way} after"), way
        assert redact(f"before {way}, after").startswith(f"before {HIDDEN}")
        assert redact(f"before {way}, after").endswith(", after")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RATCHET_KEY_FILE", "/etc/hostname"), ("SSH_AUTH_SOCK", "/run/agent.1"), ("TOKENIZERS_PARALLELISM", "false"),
        ("GIT_AUTHOR_NAME", "Somebody"), ("HF_TOKEN_PATH", "/root/token"), ("AWS_SHARED_CREDENTIALS_FILE", "/a/b/c"),
        ("AUTH_ENABLED", "always"), ("PASSWORD_MIN_LENGTH", "123456"), ("KEYBOARD", "german"), ("MY_TOKEN", "short"),
        ("AUTH_MODE", "kerberos"), ("NPM_AUTH", "kerberos"), ("SORT_KEY", "timestamps"), ("SECRET_MODE", "strict-1"),
        ("TLS_KEY", "/etc/hostname"), ("MONKEY", "banana"), ("USE_TOKEN", "required"), ("KEY_BITS_KEY", "123456"),
    ],
    ids=lambda text: text if text.isupper() else "",
)  # fmt: skip
def test_values_that_only_resemble_secrets_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    text = f"it is about {value} and others"
    assert redact(text) == text


def test_a_password_in_a_url_variable_is_also_hidden_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:p%40ss-77x@db/studies")
    assert redact("login of me with p@ss-77x (p%40ss-77x) at db") == f"login of me with {HIDDEN} ({HIDDEN}) at db"


def test_a_secret_that_contains_another_is_hidden_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "xxabcdefghxx")
    assert redact("xxabcdefghxx abcdefgh") == f"{HIDDEN} {HIDDEN}"


def test_variables_that_are_set_later_are_hidden_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redact("late-value-1") == "late-value-1"
    monkeypatch.setenv("LATE_TOKEN", "late-value-1")
    assert redact("late-value-1") == HIDDEN
    monkeypatch.delenv("LATE_TOKEN")
    assert redact("late-value-1") == "late-value-1"


# The secrets are split, so that secret scanners do not report this repository.
FORMATS = [
    ("hf_" + "AbCdEfGhIjKlMnOpQrSt", ""),
    ("sk-" + "ant-api03-0123456789abcdef", ""),
    ("ghp_" + "0123456789abcdefghij", ""),
    ("github_pat_" + "11ABCDEFG0123456789_abc", ""),
    ("glpat-" + "0123456789abcdefghij", ""),
    ("AKIA" + "IOSFODNN7EXAMPLE", ""),
    ("xoxb-" + "123456789012-abcdef", ""),
    ("eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", ""),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\ndef=\n-----END RSA PRIVATE KEY-----", ""),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\\nb3BlbnNzaC1r\\nxyz", ""),
    ("https://me:geheim@host/path", "https://(hidden)@host/path"),
    ("sftp://me:ge@heim@host/path", "sftp://(hidden)@host/path"),
    ("https://oauthtoken@github.com/x", "https://(hidden)@github.com/x"),
    ("https://h/p?a=1&token=abc&b=2", "https://h/p?a=1&token=(hidden)&b=2"),
    ("https://s3/x?X-Amz-Credential=c%2Fd&X-Amz-Signature=0a", "https://s3/x?X-Amz-Credential=(hidden)&X-Amz-Signature=(hidden)"),
    ("https://blob/x?sv=2024&sig=a%2Bb", "https://blob/x?sv=2024&sig=(hidden)"),
    ("https://hooks.slack.com/services/T0/B1/xyz", "https://hooks.slack.com/services/(hidden)"),
    ("Authorization: Basic bWU6Z2VoZWlt", "Authorization: Basic (hidden)"),
    ("{'Authorization': 'Bearer abc.def'}", "{'Authorization': 'Bearer (hidden)'}"),
    ("Bearer abcdef0123456", "Bearer (hidden)"),
    ("password=hunter22 user=me", "password=(hidden) user=me"),
    ('{"api_key": "abcdefg", "n": 1}', '{"api_key": "(hidden)", "n": 1}'),
    ("aws_secret_access_key = abcdefghij", "aws_secret_access_key = (hidden)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "left"), FORMATS, ids=range(len(FORMATS)))
def test_secrets_are_recognized_by_the_formats_of_providers(text: str, left: str) -> None:
    assert redact(f"it said: {text}") == f"it said: {left or HIDDEN}"
    assert redact(f'("{text}")') in (f'("{left or HIDDEN}")', f'("{HIDDEN}')


PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
"""Characters that `str.isprintable` accepts, listed so that Hypothesis needs no filter."""


@pytest.mark.parametrize(
    "text",
    [
        "step 300 of 300: loss 1.2345, 12,345 tokens/s", "pad_token='<pad>' eos_token: 128001, max_tokens=512",
        "https://huggingface.co/Qwen/Qwen2.5-1.5B?revision=main#files", "s3://bucket/folder/step-00000010/adapter",
        "token_count=1234567 tokenizer=Qwen2TokenizerFast", "basic understanding of bearer instruments",
        "KeyError: 'self_attn.q_proj'", "git@github.com:owner/name.git", "sftp://me@host/runs", "user@example.org",
        "task-0123456789abcdefghij risk-free-0123456789abcdef", "sha256:0123456789abcdef0123456789abcdef",
        "/home/me/secret/project/file.py:12: UserWarning: no key", "secrets are kept elsewhere", "2026-11-23T00:00:00Z",
    ],
)  # fmt: skip
def test_ordinary_lines_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    begin=st.text(PRINTABLE, min_size=4, max_size=20),
    digit=st.sampled_from("0123456789٣"),
    end=st.text(PRINTABLE, min_size=3, max_size=19),
    before=st.text(max_size=60),
    after=st.text(max_size=60),
)
def test_no_secret_remains_in_any_text_and_redaction_is_idempotent(
    begin: str, digit: str, end: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = begin + digit + end
    monkeypatch.setenv("PLANTED_SECRET", secret)
    once = redact(f"{before}{secret}{after}")
    assert secret not in once.replace(HIDDEN, "\0")
    assert redact(once) == once


@pytest.mark.parametrize(
    "text",
    ["a-" * 50_000, "://" * 30_000, "x://a:" * 20_000, "password" * 20_000, "eyJ" * 50_000, "-eyJ" * 20_000,
     "bearer a" * 9000, "?a" * 50_000,
     "-----BEGIN PRIVATE KEY-----" * 3000, "authorization: " * 8000, "sk-" * 40_000, "basic " * 20_000],
    ids=lambda text: text[:12].strip(),
)  # fmt: skip
def test_redaction_takes_linear_time(text: str) -> None:
    assert len(redact(text)) <= len(text)  # a regular expression with backtracking would not finish


def test_errors_are_shown_without_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_SECRET", "planted-4711")
    write_stderr("ratchet: planted-4711\n")
    try:
        raise RuntimeError("no planted-4711") from KeyError("planted-4711")
    except RuntimeError as error:
        print_exception(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert f"ratchet: {HIDDEN}\n" in shown
    assert f"RuntimeError: no {HIDDEN}\n" in shown
    assert "planted-4711" not in shown.replace('"planted-4711"', "")  # the traceback quotes the line of this file


class ClosedStream(io.StringIO):
    """Stream of a closed terminal."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_closed_terminal_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (ClosedStream(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        write_stderr("nobody reads it\n")


def test_everything_written_to_standard_error_in_the_context_is_redacted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_SECRET", "planted-4711")
    before = sys.stderr
    with redact_stderr():
        print("printed planted-4711", file=sys.stderr, flush=True)
        sys.stderr.writelines(["lines ", "planted-4711\n"])
        assert (sys.stderr.encoding, sys.stderr.isatty()) == (before.encoding, False)
    assert sys.stderr is before
    assert capsys.readouterr().err == f"printed {HIDDEN}\nlines {HIDDEN}\n"
