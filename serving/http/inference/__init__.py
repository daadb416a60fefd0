"""Routes beside the inference of a dialect: probes, models, token counts, KServe and OpenVINO queries."""
