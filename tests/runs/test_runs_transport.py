"""Run folders on their way between machines."""

from __future__ import annotations

from pathlib import Path

import pytest

import tightrope as tr
from tightrope.runs import Run, transport
from tightrope.runs.transport import digest, pack, unpack


def test_a_certified_run_arrives_as_it_was(certifiable: Run, tmp_path: Path) -> None:
    summary = tr.certify(certifiable, steps=5)
    files = pack(certifiable)
    assert {"config.toml", "model.safetensors", "certification.jsonl"} <= set(files)
    assert any(name.startswith("counterexamples/") for name in files)
    there = Run(tmp_path / "there")
    unpack(there, files)
    assert pack(there) == files and digest(pack(there)) == digest(files)
    assert tr.certify(there, steps=5).to_json() == summary.to_json()  # nothing is left to do


def test_links_locks_and_leftovers_stay_at_home(certifiable: Run, tmp_path: Path) -> None:
    expected = pack(certifiable)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("key")
    (certifiable.folder / "linked").symlink_to(secret)
    (certifiable.folder / "key").symlink_to(secret / "key")
    (certifiable.folder / ".half-written").write_text("x")
    with certifiable.lock("certify", False):
        assert pack(certifiable) == expected


def test_a_folder_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    assert pack(Run(tmp_path / "nothing")) == {}


def test_other_files_have_another_digest() -> None:
    seen = [
        digest(files) for files in ({}, {"a": b""}, {"b": b""}, {"a": b"b"}, {"a": b"", "b": b""})
    ]
    assert len(set(seen)) == 5
    assert digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a/b/c/d"])
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(tr.UserError, match="which is none of a run"):
        unpack(run, {"config.toml": b"", name: b"x"})
    assert not run.folder.exists()  # nothing is written before all names are looked at


def test_the_journal_comes_last(
    certifiable: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tr.certify(certifiable, steps=5)
    written: list[str] = []
    write = transport.write_bytes

    def noted(path: Path, content: bytes, **options: bool) -> None:
        written.append(path.name)
        write(path, content, **options)

    monkeypatch.setattr(transport, "write_bytes", noted)
    unpack(Run(tmp_path / "there"), pack(certifiable))
    assert written[0] == "config.toml"
    assert written[-2:] == ["certification.json", "certification.jsonl"]
