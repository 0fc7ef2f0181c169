"""Versioned messages between the agent of a job, the node's daemon, the faces and the service; and the clients.

Knows core and nothing above it: no torch, no server, the standard library only.

    entries, messages     what a job tells of itself         client           posts it over HTTP
    nodes, replicas       what daemons and replicas say      frames           the connections that carry it
    jobspec/              the document of a job              visiting         a daemon that somebody needs for long
    api, answers          what the REST API answers          service_client   asks it
"""
