"""The notice that a cloud gives before it takes a spot machine away, asked of its metadata service.

aws    IMDSv2: spot/instance-action holds a document once the machine is to be stopped, 404 before; 2 minutes' notice
       (docs.aws.amazon.com, "Spot Instance interruption notices")
gcp    instance/preempted says TRUE once it is; 30 seconds (cloud.google.com, "Create and use Spot VMs")
azure  scheduledevents holds an event `Preempt` that names this machine; 30 seconds at least (learn.microsoft.com,
       "Scheduled Events"). The first answer may take minutes: the first question switches the service on.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

Cloud = Literal["aws", "gcp", "azure"]

BASE_VARIABLE = "FINETUNE_METADATA_URL"
"""Environment variable that puts another service in the place of the cloud's."""

BASES: Mapping[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}

_EVERY_SECONDS = 5.0
_TIMEOUT_SECONDS = 2.0


class SpotNotice:
    """Whether the cloud has given notice; asked in a thread of its own."""

    def __init__(self, cloud: Cloud, *, log: Callable[[str], None]) -> None:
        self._ask = _ASKING[cloud]
        self._cloud = cloud
        self._base = os.environ.get(BASE_VARIABLE, BASES[cloud])
        self._log = log
        self._is_given = False
        self._has_warned = False

    def __call__(self) -> bool:
        """Return whether notice has been given."""
        return self._is_given

    def start(self) -> "SpotNotice":
        """Begin to ask, until notice is given or the process ends."""
        threading.Thread(target=self._watch, name="spot notice", daemon=True).start()
        return self

    def look(self) -> bool:
        """Ask once; a service that does not respond is logged once, and asked again."""
        try:
            self._is_given = self._ask(self._base)
        except (OSError, ValueError) as error:
            if not self._has_warned:
                self._has_warned = True
                self._log(f"warning: run.spot_notice: the metadata service of {self._cloud} does not respond: {error}")
        return self._is_given

    def _watch(self) -> None:
        while not self.look():
            time.sleep(_EVERY_SECONDS)


def _aws(base: str) -> bool:
    token = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, method="PUT")
    try:
        _get(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except HTTPError as error:
        if error.code != 404:
            raise
        return False
    return True


def _gcp(base: str) -> bool:
    answer = _get(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return answer.strip().upper() == "TRUE"


def _azure(base: str) -> bool:
    header = {"Metadata": "true"}
    events = json.loads(_get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", header)).get("Events", [])
    if not events:
        return False
    name = _get(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", header).strip()
    return any(event.get("EventType") == "Preempt" and name in event.get("Resources", ()) for event in events)


def _get(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    """Return what the service answers; proxies are for the world outside."""
    request = Request(url, headers=dict(headers), method=method)
    with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_SECONDS) as answer:
        return str(answer.read().decode("utf-8"))


_ASKING: Mapping[Cloud, Callable[[str], bool]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
