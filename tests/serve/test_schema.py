"""Requests made from the server's own OpenAPI document, valid and broken, never break it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_the_server_lives_up_to_its_document(server, mode):
    statuses = set()
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in api.get_all_operations()]
    assert {"/v1/completions", "/v1/models", "/health"} <= {operation.path for operation in operations}
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        def check(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "calm-2"  # else nearly all would be for models that are not there
            answer = case.call(timeout=60)
            statuses.add(answer.status_code)
            case.validate_response(answer, checks=CHECKS)

        if mode is GenerationMode.POSITIVE or operation.body:  # without a body nothing can be broken
            check()
    assert server.client.get("/health").status_code == 200
    assert 400 in statuses
    assert 200 in statuses or mode is GenerationMode.NEGATIVE
