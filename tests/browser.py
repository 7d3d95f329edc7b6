"""Pages in headless Chromium: what is drawn, what the console says, how wide the page is."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
MISSING = "no chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"


class Browser:
    """Opens files."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = 1280, scheme: str = "light") -> None:
        """Open the page at a width and in a color scheme, as a phone would where it is narrow."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(page.as_uri())
        self.wait("return document.documentElement.dataset.drawn")

    def run(self, script: str, *arguments: object) -> Any:
        """Return what the script returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *, seconds: float = 60.0) -> Any:
        """Return what the script returns as soon as that is true; a page may be replaced meanwhile."""
        waits, common = (pytest.importorskip(f"selenium.{name}") for name in ("webdriver.support.ui", "common"))
        waiting = waits.WebDriverWait(self.driver, seconds, 0.02, [common.WebDriverException])
        return waiting.until(lambda _: self.run(script))

    @contextmanager
    def script_in_every_page(self, script: str) -> Iterator[None]:
        """Run the script before those of each page that is opened within the block."""
        added = self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        yield
        self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

    def complaints(self) -> list[str]:
        """Return what the console has shown since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Return a browser; the test is skipped where none is installed."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(120)
    yield Browser(driver)
    driver.quit()
