"""What a snapshot says about a job's memory: where the bytes are, which holes, who pins them, why a request failed.

Pure: a `Snapshot` goes in, values come out. What does not add up in a snapshot is a `Finding`, never an exception. Nothing
here draws; `allocscope inspect` does.
"""

from allocscope.allocator.diagnosis.device import DeviceDiagnosis, Diagnosis, diagnose
from allocscope.allocator.diagnosis.failure import Failure
from allocscope.allocator.diagnosis.findings import Finding
from allocscope.allocator.diagnosis.holes import Hole, Site
from allocscope.allocator.diagnosis.moment import Moment
from allocscope.allocator.diagnosis.picture import much_stranded, picture_of

__all__ = [
    "DeviceDiagnosis",
    "Diagnosis",
    "Failure",
    "Finding",
    "Hole",
    "Moment",
    "Site",
    "diagnose",
    "much_stranded",
    "picture_of",
]
