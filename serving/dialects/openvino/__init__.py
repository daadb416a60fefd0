"""The dialect of OpenVINO Model Server."""
