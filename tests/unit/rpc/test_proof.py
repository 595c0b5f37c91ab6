"""What proves a secret, and what does not."""

from __future__ import annotations

import pytest

from cometmq.rpc import proof
from cometmq.rpc.proof import CHALLENGE_S, Challenges, Verdict, proven, server_proof, token

SECRET, OTHER = "correct-horse-battery", "wrong-horse-battery-x"
NONCE, METHOD, NOW_S = b"n" * 32, "/cometmq.v1.MemberService/Elect", 1_000.0


@pytest.fixture
def server() -> Challenges:
    return Challenges(b"k" * 32)


def good_token(server: Challenges, secret: str = SECRET) -> bytes:
    return token(secret, METHOD, NONCE, server.issue(NONCE, NOW_S))


def test_both_learn_that_the_other_knows_the_secret(server: Challenges) -> None:
    challenge = server.issue(NONCE, NOW_S)
    proofs = [server_proof(each, NONCE, challenge) for each in (OTHER, SECRET)]
    assert proven(["another-one-here", SECRET], NONCE, challenge, proofs) == SECRET
    brought = token(SECRET, METHOD, NONCE, challenge)
    assert server.judge([OTHER, SECRET], METHOD, brought, NOW_S) is Verdict.GOOD
    for words in (challenge, brought, *proofs):
        assert SECRET.encode() not in words


@pytest.mark.parametrize("proofs", [[], [b""], [b"\0" * 32], [b"x"] * 1_000])
def test_a_server_that_knows_nothing_proves_nothing(proofs: list[bytes]) -> None:
    assert proven([SECRET], NONCE, b"c" * 48, proofs) is None


def test_a_servers_proof_is_no_callers_nor_one_for_another_nonce(server: Challenges) -> None:
    challenge = server.issue(NONCE, NOW_S)
    mine = server_proof(SECRET, NONCE, challenge)
    assert proven([SECRET], b"m" * 32, challenge, [mine]) is None
    assert server.judge([SECRET], METHOD, NONCE + challenge + mine, NOW_S) is Verdict.WRONG
    brought = token(SECRET, METHOD, NONCE, challenge)
    assert proven([SECRET], NONCE, challenge, [brought[-32:]]) is None


def test_a_proof_is_good_once(server: Challenges) -> None:
    brought = good_token(server)
    assert server.judge([SECRET], METHOD, brought, NOW_S) is Verdict.GOOD
    for later_s in (0.0, 1.0, CHALLENGE_S - 0.01, CHALLENGE_S, 10 * CHALLENGE_S):
        assert server.judge([SECRET], METHOD, brought, NOW_S + later_s) is Verdict.REPLAYED


def test_a_proof_is_good_once_whatever_comes_between(server: Challenges) -> None:
    """Over the turns of what is remembered, at any moment of a challenge's life."""
    for step in range(200):
        now_s = NOW_S + step * CHALLENGE_S / 7
        challenge = server.issue(NONCE, now_s)
        brought = token(SECRET, METHOD, NONCE, challenge)
        used_s = now_s + (step % 11) / 11 * CHALLENGE_S
        if step % 3:  # else nobody has used it in between
            good = server.judge([SECRET], METHOD, good_token_at(server, now_s), now_s)
            assert good is Verdict.GOOD
        assert server.judge([SECRET], METHOD, brought, used_s) is Verdict.GOOD
        again_s = now_s + (step % 13) / 12 * CHALLENGE_S
        if again_s >= used_s:
            assert server.judge([SECRET], METHOD, brought, again_s) is Verdict.REPLAYED


def good_token_at(server: Challenges, now_s: float) -> bytes:
    return token(SECRET, METHOD, NONCE, server.issue(NONCE, now_s))


def test_a_proof_is_good_for_its_method_and_its_time(server: Challenges) -> None:
    other_method = server.judge([SECRET], METHOD + "x", good_token(server), NOW_S)
    assert other_method is Verdict.WRONG
    late = server.judge([SECRET], METHOD, good_token(server), NOW_S + CHALLENGE_S)
    assert late is Verdict.REPLAYED


def test_a_proof_is_good_at_the_process_that_asked_for_it(server: Challenges) -> None:
    after_its_restart = Challenges(b"l" * 32)
    verdict = after_its_restart.judge([SECRET], METHOD, good_token(server), NOW_S)
    assert verdict is Verdict.REPLAYED


def test_another_secret_is_none(server: Challenges) -> None:
    assert server.judge([SECRET], METHOD, good_token(server, OTHER), NOW_S) is Verdict.WRONG
    assert server.judge([], METHOD, good_token(server), NOW_S) is Verdict.WRONG


def test_what_is_changed_in_any_place_is_good_for_nothing(server: Challenges) -> None:
    brought = good_token(server)
    for place in range(len(brought)):
        changed = bytearray(brought)
        changed[place] ^= 1
        assert server.judge([SECRET], METHOD, bytes(changed), NOW_S) is not Verdict.GOOD
    for words in (b"", b"x", brought[:-1], brought + b"x"):
        assert server.judge([SECRET], METHOD, words, NOW_S) is Verdict.WRONG
    assert server.judge([SECRET], METHOD, brought, NOW_S) is Verdict.GOOD, "nothing was used up"


def test_no_more_is_remembered_than_fits(
    server: Challenges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "USED_MAX", 3)
    verdicts = [server.judge([SECRET], METHOD, good_token(server), NOW_S) for _ in range(4)]
    assert verdicts == [Verdict.GOOD] * 3 + [Verdict.REPLAYED]
    after_s = NOW_S + CHALLENGE_S
    assert server.judge([SECRET], METHOD, good_token_at(server, after_s), after_s) is Verdict.GOOD
