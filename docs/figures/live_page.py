"""Takes the picture of the live page of a server under load: docs/figures/live_page.py URL FILE

It needs selenium, chromium and chromedriver.
"""

import shutil
import sys
import time

from selenium import webdriver

# What the page plots covers half a minute.
WATCHED_SECONDS = 30

url, file = sys.argv[1:]
options = webdriver.ChromeOptions()
options.binary_location = shutil.which("chromium") or ""
for flag in ("--headless=new", "--no-sandbox", "--disable-background-networking", "--window-size=1400,1260"):
    options.add_argument(flag)
with webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))) as chrome:
    chrome.get(f"{url}/dashboard")
    time.sleep(WATCHED_SECONDS)
    if not chrome.save_screenshot(file):
        sys.exit(f"{file} cannot be written")
