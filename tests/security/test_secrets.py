"""What looks like a secret is written down nowhere: one form a row, put together here so that none stands in a file."""

import dataclasses
import time

import pytest

from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.run_folder.folder import refuse_secrets
from posbench.run_folder.redaction import redact, secret_keys

HEX = "0123456789" * 4
MIXED = "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY"
FORMS = {
    "W&B, end of a sentence": HEX + ".",
    "W&B, in an address": HEX + "/",
    "Hugging Face": "hf_" + "a1B2" * 8,
    "GitHub": "ghp_" + "a1B2" * 9,
    "OpenAI": "sk-proj-" + "a1B2" * 8,
    "AWS id": "AKIA" + "A1B2" * 4,
    "AWS passing id": "ASIA" + "A1B2" * 4,
    "AWS secret": MIXED,
    "GitLab": "glpat-" + "a1B2" * 5,
    "Slack": "xoxb-" + "1234567890-" * 2 + "a1B2" * 6,
    "Google": "AIza" + "a1B2-" * 7,
    "npm": "npm_" + "a1B2" * 9,
    "PyPI": "pypi-" + "AgEIcHlwaS5vcmc" + "a1B2" * 9,
    "JSON web token": "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxIn0." + "a1B2-_" * 5,
    "user and password": "me:hunter22@db.example.org",
    "user and password, here": "me:hunter22@localhost:5432",
}
LABELS = (
    "Authorization: Bearer ",
    "Basic ",
    "token=",
    "--api-key ",
    "api_key: ",
    '"password": "',
    '{"token": "',
    "SECRET=",
)


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_redacted_by_its_form(form: str, tiny_config: Config) -> None:
    secret = FORMS[form]
    told = redact(f"cannot reach {secret} at all")
    assert told.startswith("cannot reach [redacted]") and told.endswith(" at all")
    assert secret.strip("./") not in told and "hunter22" not in told
    config = dataclasses.replace(tiny_config, data=dataclasses.replace(tiny_config.data, path=secret))
    with pytest.raises(UserError, match=r"^data\.path looks like it holds a secret"):
        refuse_secrets(config)


@pytest.mark.parametrize("label", LABELS)
def test_a_secret_is_redacted_by_the_word_before_it(label: str) -> None:
    told = redact(f"x {label}correcthorsebattery y")
    assert told.startswith(f"x {label}[redacted]") and "horse" not in told and told.endswith(" y")


def test_a_secret_as_a_name_is_found_and_not_repeated(tiny_config: Config) -> None:
    splits = {"hf_" + "a1B2" * 8: "train"}
    config = dataclasses.replace(tiny_config, data=dataclasses.replace(tiny_config.data, splits=splits))
    with pytest.raises(UserError, match=r"^data\.splits\.\[redacted\] looks like it holds a secret"):
        refuse_secrets(config)


def test_a_revision_is_a_commit_and_nothing_else() -> None:
    assert list(secret_keys({"data": {"revision": HEX}})) == []
    assert list(secret_keys({"data": {"revision": "hf_" + "a1B2" * 8}})) == ["data.revision"]


@pytest.mark.parametrize(
    "text",
    [
        "training.tokens=2000000 data.tokenizer=bytes num_tokens: 5 token_dim=64 key_tokens=4",
        "git@github.com:user/repo.git me@example.org org/name@main 12:30:45 yarn:factor=2",
        "/data/sets/English/Novels/Of/The/Nineteenth/Century/2024/part-0001.txt",
        "outputs/demo/rope-s0-1775196f sha256:" + "0123456789abcdef" * 4,
        "basic idea, bearer of news, the secret of it",
        "data.revision=" + HEX,
        "https://example.org/x@y",
        "hub/models--gpt2/snapshots/" + HEX + "/tokenizer.json",
    ],
)
def test_what_only_resembles_a_secret_is_kept(text: str) -> None:
    assert redact(text) == text


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "part", ["a", "A", "-", "--", "a,", "a:", "eyJ-", "eyJaaaaaaaa.", "a.", "A1b/", "--a-", "x:y;", "@", "token"]
)
def test_no_text_takes_long(part: str) -> None:
    before = time.process_time()
    redact(part * (200_000 // len(part)))
    assert time.process_time() - before < 2
