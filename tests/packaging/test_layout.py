"""The repository's outside: boundaries between packages, public names, versions, and a README that stays true."""

import ast
import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PACKAGES = ("chunk_recur", "offload", "oomb", "paged_kv", "sparse_pages")

# What each package may import besides itself and Python's own library.
MAY_IMPORT = {
    "chunk_recur": {"torch", "typing_extensions"},
    "offload": {"torch", "triton", "typing_extensions"},
    "paged_kv": {"torch", "triton", "numpy", "typing_extensions", "transformers"},  # the last in one adapter, an extra
    "sparse_pages": {"torch", "triton", "typing_extensions"},
    "oomb": {
        "chunk_recur", "offload", "paged_kv", "sparse_pages", "torch", "triton", "typing_extensions", "transformers",
        "tokenizers", "accelerate", "datasets", "safetensors", "tqdm", "yaml", "matplotlib", "psutil",
        "numpy", "peft",
    },
}  # fmt: skip


def source(package: str) -> Path:
    return ROOT / "packages" / package / "src" / package


def metadata(package: str) -> dict:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def imports_of(path: Path) -> set[str]:
    """Top-level names of everything a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_whatever_the_default_device_is_tensors_are_made_where_they_belong(package):
    """With `torch.set_default_device("cuda")` a host tensor that names no device is none: it cannot be pinned."""
    makers = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
    makers |= {"tensor", "zeros"}
    for path in sorted(source(package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in makers}:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert any(word.arg == "device" for word in node.keywords), f"{place}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package):
    files = sorted(source(package).rglob("*.py"))
    assert files
    allowed = MAY_IMPORT[package] | {package} | set(sys.stdlib_module_names)
    for path in files:
        assert imports_of(path) <= allowed, f"{path.relative_to(ROOT)}: {sorted(imports_of(path) - allowed)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_declares_what_it_imports(package):
    extras = metadata(package).get("optional-dependencies", {}).values()
    lines = [*metadata(package)["dependencies"], *(line for extra in extras for line in extra)]
    declared = {re.split(r"[ ><=;\[]", line)[0].lower() for line in lines}
    names = {"typing_extensions": "typing-extensions", "yaml": "pyyaml"} | {
        part: "oomb-" + part.replace("_", "-") for part in PACKAGES if part != "oomb"
    }
    third_party = MAY_IMPORT[package] - {"psutil"}  # Windows only; accelerate brings it
    used = set().union(*(imports_of(path) for path in source(package).rglob("*.py"))) & third_party
    assert {names.get(name, name) for name in used} <= declared


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_few_and_exist(package):
    tree = ast.parse((source(package) / "__init__.py").read_text(encoding="utf-8"))
    public = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    assert 1 <= len(public) <= 8, public
    assert len(set(public)) == len(public)
    module = __import__(package)
    for name in public:
        assert getattr(module, name).__doc__, f"{package}.{name} has no docstring"


def test_all_packages_carry_one_version_and_the_trainer_wants_exactly_it():
    versions = {metadata(package)["version"] for package in PACKAGES}
    assert len(versions) == 1
    wanted = [line for line in metadata("oomb")["dependencies"] if line.startswith("oomb-")]
    version = versions.pop()
    assert sorted(wanted) == sorted(f"oomb-{part.replace('_', '-')}=={version}" for part in PACKAGES if part != "oomb")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_what_a_release_needs(package):
    project = metadata(package)
    assert project["name"] == ("oomb" if package == "oomb" else "oomb-" + package.replace("_", "-"))
    assert project["requires-python"] == ">=3.10" and project["readme"] == "README.md"
    assert any(line.startswith("torch>=2.11") for line in project["dependencies"])
    assert (source(package) / "py.typed").exists()
    assert "```python" in (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")


def test_the_root_holds_tool_settings_only():
    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))) == {"tool"}


def tree_in_readme() -> set[str]:
    """Paths of the README's annotated tree: two spaces a level, a comment after `#`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- tree -->\s*```text\n(.*?)```", text, re.DOTALL)[1]
    paths, parents = set(), []
    for line in block.splitlines():
        entry, _, comment = line.partition("#")
        name = entry.strip()
        if not name:
            continue
        assert comment.strip(), f"{name} has no comment"
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], name]
        paths.add("".join(parents))
    return paths


def test_the_readme_tree_lists_every_source_file_and_nothing_else():
    listed = tree_in_readme()
    patterns = ("packages/*/src/**/*.py", "packages/*/src/**/*.yaml", "examples/*.py", "benchmarks/*.py", "docs/*.md")
    files = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    assert len(files) > 40
    assert not files - listed, f"missing from README.md: {sorted(files - listed)}"
    gone = {path for path in listed if not (ROOT / path).exists()}
    assert not gone, f"in README.md but not there: {sorted(gone)}"


@pytest.mark.parametrize("extra, package", [("torchao", "torchao"), ("qlora", "bitsandbytes")])
def test_an_extra_brings_what_transformers_takes(extra, package):
    """transformers takes an older one for none, after it was installed as it was told to be."""
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    least = getattr(import_utils, f"{package.upper()}_MIN_VERSION")
    lines = metadata("oomb")["optional-dependencies"][extra]
    [bound] = [line.partition(">=")[2] for line in lines if line.startswith(package)]
    assert Version(bound) >= Version(least)
