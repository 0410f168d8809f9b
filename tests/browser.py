"""A headless Chromium that shows a page and tells what happened in it, over its DevTools protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page in one browser."""

    def __init__(self, socket):
        self._socket = socket
        self._num_calls = 0
        self._answers = {}
        self.requests, self.errors = [], []

    async def call(self, method, **parameters):
        self._num_calls += 1
        number = self._num_calls
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while number not in self._answers:
            self._take(json.loads((await asyncio.wait_for(self._socket.receive(), 300)).data))
        answer = self._answers.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def _take(self, message):
        method, parameters = message.get("method"), message.get("params", {})
        if "id" in message:
            self._answers[message["id"]] = message
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(parameters["args"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"])

    async def evaluate(self, expression):
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, path, width=1200, height=900, scheme="light"):
        """Show a file; returns when the page says that it is ready."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        mobile = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        await self.scheme(scheme)
        await self.call("Page.navigate", url=Path(path).resolve().as_uri())
        for _ in range(3000):
            if await self.evaluate("document.documentElement?.dataset.ready === '1'"):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{path} never became ready: {self.errors}")

    async def scheme(self, name):
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def press(self, key):
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    async def pdf(self):
        found = await self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(found["data"])


KEYS = {"Tab": 9, " ": 32, "Enter": 13}


def visit(look):
    """What `look(page)`, a coroutine, finds in a new browser."""
    return asyncio.run(_visit(look))


async def _visit(look):
    import aiohttp  # noqa: PLC0415 - needed with a browser alone

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        words = [PATH, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        words += [f"--user-data-dir={home}", "--no-first-run", "--disable-background-networking", "about:blank"]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        try:
            address = next(line for line in process.stderr if "DevTools listening on" in line).split()[-1]
            port = address.split(":")[2].split("/")[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    targets = await answer.json()
                target = next(target for target in targets if target["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    return await look(Page(socket))
        finally:
            process.terminate()
            process.wait()
            process.stderr.close()
