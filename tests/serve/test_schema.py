"""Property-based tests: valid and invalid requests generated from the server's OpenAPI schema."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_server_conforms_to_its_schema(server, mode):
    statuses = set()
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in api.get_all_operations()]
    assert {"/v1/completions", "/v1/models", "/health"} <= {operation.path for operation in operations}
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        def check(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "calm-2"  # otherwise nearly all requests would get a 404
            response = case.call(timeout=60)
            statuses.add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        if mode is GenerationMode.POSITIVE or operation.body:  # without a body nothing can be invalid
            check()
    assert server.client.get("/health").status_code == 200
    assert 400 in statuses
    assert 200 in statuses or mode is GenerationMode.NEGATIVE
