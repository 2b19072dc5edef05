"""Requests a second over a day, in the shape of a public trace; and how long prompts and answers are on average."""

from __future__ import annotations

import numpy as np

from bench.fleet.cells import Lengths

DAY_SECONDS = 86_400.0
INTERVAL_SECONDS = 600.0
AZURE_CHAT = Lengths(prompt=1155.0, output=211.0)
"""Means of the conversations in Azure's LLM inference trace of 2023 (19,366 requests)."""
# fmt: off
SERVEGEN_DAY = (
    919, 868, 828, 802, 775, 743, 723, 690, 683, 676, 652, 648, 690, 673, 648, 641, 718, 719,
    715, 713, 702, 673, 670, 664, 693, 659, 659, 661, 662, 663, 664, 668, 680, 676, 670, 664,
    666, 696, 719, 725, 738, 769, 794, 798, 813, 829, 855, 870, 951, 1052, 1032, 1099, 1138, 1172,
    1227, 1280, 1312, 1342, 1359, 1499, 1339, 1120, 1117, 1126, 1146, 1140, 1150, 1137, 1090, 1024, 963, 963,
    951, 975, 994, 999, 993, 1080, 1081, 995, 1012, 1045, 1056, 1063, 1071, 1061, 1072, 1052, 1068, 1072,
    1071, 1076, 1088, 1071, 1076, 1068, 1072, 1053, 1054, 1052, 1045, 1026, 1046, 1020, 1025, 1016, 1016, 1017,
    1037, 1053, 1066, 1068, 1071, 1109, 1113, 1150, 1187, 1203, 1249, 1291, 1389, 1415, 1455, 1465, 1502, 1532,
    1512, 1514, 1526, 1509, 1519, 1508, 1501, 1462, 1440, 1404, 1360, 1341, 1304, 1250, 1192, 1154, 1109, 1069,
)
# fmt: on
"""Mean requests a second in each ten minutes of one day: the fifth one of the workload `m-small` that ServeGen (arXiv
2505.09999) publishes, summed over its 43 clients. It is traffic of Alibaba Cloud Model Studio."""


class Demand:
    """The trace's shape, with another peak."""

    def __init__(self, peak_rate: float) -> None:
        """`peak_rate`: requests a second in the busiest ten minutes."""
        self.peak = peak_rate
        shares = np.array(SERVEGEN_DAY, dtype=np.float64)
        self._rates = shares / shares.max() * peak_rate
        self._middles = (np.arange(len(shares)) + 0.5) * INTERVAL_SECONDS

    def rate(self, time: float) -> float:
        """Requests a second so many seconds after midnight: by straight lines between the middles of the intervals."""
        return float(np.interp(time, self._middles, self._rates))
