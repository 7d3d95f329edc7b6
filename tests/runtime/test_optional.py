import gc
import subprocess
import sys
import threading

import pytest

from finetune.runtime.optional import lazily


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Create a package `slow` whose module `slow.part` counts its imports."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("slow", "slow.part", "slow.many"):
        sys.modules.pop(name, None)


def test_a_module_is_imported_at_its_first_use(package):
    with lazily():
        from slow import part
    assert "slow" not in sys.modules
    assert part.answer() == 42
    assert "slow.part" in sys.modules


def test_a_missing_lazy_module_raises_at_its_first_use():
    with lazily():
        from no_such_package import part
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        part.answer()


def test_a_lazy_submodule_is_found_in_a_package_that_imports_its_attributes(package, tmp_path):
    (tmp_path / "slow" / "__init__.py").write_text(
        "import importlib\ndef __getattr__(name):\n"
        "    if name.startswith('_'): raise AttributeError(name)\n"
        "    return importlib.import_module(f'slow.{name}')\n"
    )
    import slow

    with lazily():
        import slow.part as part
    assert "slow.part" not in sys.modules
    assert part.answer() == 42
    assert slow.part is sys.modules["slow.part"]


def test_imports_are_ordinary_again_afterwards(package):
    before = list(sys.meta_path)
    with pytest.raises(ZeroDivisionError), lazily():
        raise ZeroDivisionError
    with lazily():
        from slow import part as lazy
    assert sys.meta_path == before
    import slow.part

    assert type(slow.part) is not type(lazy)
    assert slow.part.answer() == lazy.answer() == 42


def test_modules_imported_by_a_command_are_frozen_for_the_garbage_collector(package):
    threshold, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with lazily(freeze=True):
        from slow import part
    assert gc.get_freeze_count() == num_frozen
    try:
        assert part.answer() == 42
        assert gc.get_freeze_count() > num_frozen
        assert gc.get_threshold() == threshold
    finally:
        gc.unfreeze()


def test_frozen_objects_of_triton_cause_no_leak_report_at_exit():
    pytest.importorskip("triton")
    code = (
        "from finetune.runtime.optional import lazily\n"
        "with lazily(freeze=True):\n    from json import tool\n"
        "import triton\n"
        "tool.main"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stderr == ""


def test_imports_in_another_thread_are_not_lazy():
    found = []

    def work():
        from json import decoder

        found.append(decoder.JSONDecoder)

    with lazily():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert isinstance(found[0], type), "a class, looked up at once"
