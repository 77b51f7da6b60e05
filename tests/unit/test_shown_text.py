"""What somebody else wrote is shown as text, and passwords aren't shown."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ConfigError
from tests.helpers.internals import (
    Secrets,
    is_secret_name,
    masked_arguments,
    masked_override,
    masked_text,
    missing_secrets,
    printable,
    restored_config,
)


@given(text=st.text())
def test_no_character_of_a_text_steers_the_terminal(text: str) -> None:
    one_line = printable(text)
    assert {unicodedata.category(each) for each in one_line} & {"Cc", "Cs", "Zl", "Zp"} == set()
    assert printable(one_line) == one_line
    # Lone surrogates couldn't be encoded.
    one_line.encode()
    assert printable(text, multiline=True).count("\n") == text.count("\n")


def test_escapes_are_readable_and_other_languages_stay() -> None:
    assert printable("\x1b]0;x\x07\x9b31m\r\u202e\udcff\n") == r"\x1b]0;x\x07\x9b31m\r\u202e\udcff\n"
    for text in ("äöü – 训练 µs", "👩\u200d🔬", "می\u200cشود"):
        assert printable(text) == text


ADDRESSES = {
    "http://user:SECRET@host:5000/x": "http://user:***@host:5000/x",
    "http://:SECRET@host": "http://:***@host",
    "postgresql+psycopg://u:SEC@RET@host/db": "postgresql+psycopg://u:***@host/db",
    "mysql://u:SEC/RET@host/db": "mysql://u:***@host/db",
    "https://ghp_SECRET0123456789@github.com/a": "https://***@github.com/a",
    "https://host/?token=SECRET&x=1": "https://host/?token=***&x=1",
    "https://host/?apiKey=SECRET;x=1": "https://host/?apiKey=***;x=1",
    "s3://bucket/x?X-Amz-Signature=SECRET": "s3://bucket/x?X-Amz-Signature=***",
    "gs://bucket/x?X-Goog-Signature=SECRET": "gs://bucket/x?X-Goog-Signature=***",
    "https://host/#access_token=SECRET": "https://host/#access_token=***",
    "failed: ftp://a:SECRET@b (and ftp://c:SECRET@d)": "failed: ftp://a:***@b (and ftp://c:***@d)",
}
WITHOUT_SECRETS = (
    "http://host:5000/path/a@b",
    "git+ssh://git@github.com/a",
    "https://host/?max_tokens=5",
    "file:///a/b:c@d",
    "key:value@host",
)


@pytest.mark.parametrize("text", ADDRESSES)
def test_secrets_in_addresses_are_masked(text: str) -> None:
    assert masked_text(text) == ADDRESSES[text]


@pytest.mark.parametrize("text", WITHOUT_SECRETS)
def test_other_addresses_stay(text: str) -> None:
    assert masked_text(text) == text


def test_names_of_secrets() -> None:
    secret = "password db_password passwd PWD api_key apiKey x-api-key token hf_token accessToken client_secret"
    other = "tokenizer num_tokens max_new_tokens pad_token eos_token token_id tokens_per_second key monkey tokenize "
    other += "token_mixer token_embedding token_type_ids token_dropout class_token register_token mask_token_rate"
    assert [name for name in secret.split() if not is_secret_name(name)] == []
    assert [name for name in other.split() if is_secret_name(name)] == []


CONFIG: dict[str, Any] = {
    "logger": {"mlflow": {"_target_": "a.B", "tracking_uri": "http://u:hunter2@h"}},
    "data": {
        "tokenizer": "bert",
        "pad_token": "<pad>",
        "drop_token": 0.1,
        "hf_token": "hf_0123",
        "use_auth_token": True,
    },
    "model": {"copy": "x/hf_0123", "credentials": [{"user": "me", "pin": 1234}], "secrets": {"_target_": "a.Vault"}},
}


def test_a_configuration_is_masked_and_restored() -> None:
    secrets = Secrets(CONFIG)
    masked = secrets.masked_config()
    assert masked == {
        "logger": {"mlflow": {"_target_": "a.B", "tracking_uri": "http://u:***@h"}},
        "data": {**CONFIG["data"], "hf_token": "***"},
        "model": {"copy": "x/***", "credentials": [{"user": "***", "pin": "***"}], "secrets": {"_target_": "a.Vault"}},
    }
    assert restored_config(masked, secrets.entries(), file="secrets.yaml") == CONFIG
    assert "logger.mlflow.tracking_uri" in missing_secrets(masked)
    # A value that was edited since stays.
    masked["logger"]["mlflow"]["tracking_uri"] = "http://u:other1@h"
    restored = restored_config(masked, secrets.entries(), file="secrets.yaml")
    assert restored["logger"]["mlflow"]["tracking_uri"] == "http://u:other1@h"
    assert restored["data"]["hf_token"] == "hf_0123"


@pytest.mark.parametrize(
    ("config", "entries"),
    [
        ({"model": {"_target_": "***"}}, [{"key": ["model", "_target_"], "value": "os.system"}]),
        ({"name": "a***"}, [{"key": ["name"], "value": {"_target_": "os.system"}}]),
    ],
)
def test_secrets_change_nothing_else(config: dict[str, object], entries: list[dict[str, object]]) -> None:
    with pytest.raises(ConfigError, match=r"secrets\.yaml doesn't belong"):
        restored_config(config, entries, file="secrets.yaml")


@pytest.mark.parametrize(
    "entries", [None, "x", [1], [{"key": 1}], [{"key": [[]], "value": 1}], [{"key": ["a", "b"], "value": 1}]]
)
def test_damaged_secrets_change_nothing(entries: object) -> None:
    config = {"a": [1, "***"], "b": "***"}
    assert restored_config(config, entries, file="secrets.yaml") == config


def test_what_was_typed_is_masked() -> None:
    assert masked_override("++model.hf_token='abc'") == "++model.hf_token=***"
    assert (
        masked_override("logger.a={api_key:'b c',n:1,uri:http://u:p@h}")
        == "logger.a={api_key:***,n:1,uri:http://u:***@h}"
    )
    assert masked_override("model.token=${oc.env:TOKEN}") == "model.token=${oc.env:TOKEN}"
    assert masked_override("optimizer.lr=0.1") == "optimizer.lr=0.1"
    assert masked_arguments(["a.py", "--api-key", "abc", "--token=abc", "-n", "3"]) == [
        "a.py",
        "--api-key",
        "***",
        "--token=***",
        "-n",
        "3",
    ]
