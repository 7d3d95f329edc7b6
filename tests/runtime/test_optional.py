import builtins
import sys
import threading

import pytest

from finetune.runtime.optional import lazily


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `slow` whose module `slow.part` counts how often it is imported."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("slow", "slow.part"):
        sys.modules.pop(name, None)


def test_a_module_is_imported_at_its_first_use(package):
    with lazily():
        from slow import part
    assert "slow" not in sys.modules
    assert part.answer() == 42
    assert "slow.part" in sys.modules


def test_what_is_replaced_in_the_module_is_found_replaced(package, monkeypatch):
    with lazily():
        from slow import part as other
    assert other.answer() == 42
    monkeypatch.setattr("slow.part.answer", lambda: 7)
    assert other.answer() == 7


def test_a_module_that_is_missing_is_missed_when_it_is_used():
    with lazily():
        from no_such_package import part
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        part.answer()


def test_imports_are_ordinary_again_afterwards():
    before = builtins.__import__
    with pytest.raises(ZeroDivisionError), lazily():
        raise ZeroDivisionError
    assert builtins.__import__ is before


def test_another_thread_imports_at_once():
    found = []

    def work():
        from json import decoder

        found.append(decoder.JSONDecoder)

    with lazily():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert isinstance(found[0], type), "a class, looked up at once"
