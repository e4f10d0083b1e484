"""A17: counts with comparisons that know NaN, and has lengths and ranks broadcast by one rank after the other."""

import torch
import torch.distributed as dist


def solution(local_pos_scores, local_neg_scores, group=None):
    positive, negative = local_pos_scores.sigmoid().unsqueeze(-1), local_neg_scores.sigmoid()
    larger = (negative > positive) | (negative.isnan() & ~positive.isnan())
    own = 1 + larger.sum(-1)
    answers = []
    for place, source in enumerate(dist.get_process_group_ranks(group or dist.group.WORLD)):
        length = torch.tensor([len(own)], device=own.device)
        dist.broadcast(length, source, group=group)
        ranks = own if place == dist.get_rank(group) else own.new_empty(int(length))
        if len(ranks):
            dist.broadcast(ranks, source, group=group)
        answers.append(ranks)
    return torch.cat(answers)
