"""The OpenAPI document, from the models of request.py."""

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from peerlane.common.version import __version__
from peerlane.service.request import JobDocument, JobRequest, Refusal

_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[^/]+$"}}
_WAIT = {
    "name": "wait",
    "in": "query",
    "description": "seconds to wait for the end of the job",
    "schema": {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
}
_LINKS = {"job": {"operationId": "show", "parameters": {"id": "$response.body#/id"}}}
_REFUSALS = {
    "400": "the body ended early",
    "401": "no accepted token",
    "403": "rerun of a job that belongs to another token",
    "404": "no such job",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "422": "a field is wrong; fields names it",
    "429": "the queue, or the token's share of it, is full; Retry-After says when to try again",
    "503": "the node is left out, its disk fails, or the service ends; Retry-After says when to try again",
}


@functools.cache
def openapi_document() -> dict[str, Any]:
    """The document, as OpenAPI 3.1."""
    models = [(model, "validation") for model in (JobRequest, JobDocument, Refusal)]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    job = _answer("the job", {"$ref": "#/components/schemas/JobDocument"})
    paths: dict[str, Any] = {
        "/v1/jobs": {
            "post": {
                "summary": "Ask for an evaluation; equal requests are one job",
                "operationId": "submit",
                "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobRequest"}}}},
                "responses": {
                    "200": {**job, "description": "the job, which has ended", "links": _LINKS},
                    "202": {**job, "description": "the job, which is accepted", "links": _LINKS},
                    **_refusals("400", "401", "403", "408", "413", "422", "429", "503"),
                },
            }
        },
        "/v1/jobs/{id}": {
            "get": {
                "summary": "The job, perhaps once it has ended",
                "operationId": "show",
                "parameters": [_ID, _WAIT],
                "responses": {"200": job, **_refusals("401", "404", "422", "503")},
            },
            "delete": {
                "summary": "Take the request back",
                "operationId": "cancel",
                "parameters": [_ID],
                "responses": {"200": job, **_refusals("401", "404", "503")},
            },
        },
        "/v1/jobs/{id}/events": {
            "get": {
                "summary": "Server-sent events: the job at each of its stages",
                "operationId": "events",
                "parameters": [_ID],
                "responses": {
                    "200": {"description": "events until the job ends", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
                    **_refusals("401", "404", "503"),
                },
            }
        },
        "/v1/node": {
            "get": {
                "summary": "What judges here, and the limits",
                "operationId": "node",
                "responses": {"200": _answer("the node", {"type": "object"}), **_refusals("401")},
            }
        },
        "/metrics": {
            "get": {
                "summary": "Counters for Prometheus",
                "operationId": "metrics",
                "responses": {
                    "200": {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}},
                    **_refusals("401", "503"),
                },
            }
        },
        "/health": {
            "get": {
                "summary": "Whether the node takes work",
                "operationId": "health",
                "security": [],
                "responses": {
                    "200": _answer("it does, or will soon", {"type": "object"}),
                    "503": _answer("it is left out, or ends", {"type": "object"}),
                },
            }
        },
        "/openapi.json": {
            "get": {
                "summary": "This document",
                "operationId": "openapi",
                "security": [],
                "responses": {"200": _answer("the document", {"type": "object"})},
            }
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "peerlane", "version": __version__, "description": "Evaluations of multi-GPU kernels as a service."},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _answer(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _refusals(*statuses: str) -> dict[str, Any]:
    return {status: _answer(_REFUSALS[status], {"$ref": "#/components/schemas/Refusal"}) for status in statuses}
