// Finds texts that have run into a loop, as runtime/loops.py does, which says what a loop is: the same sequence of at most
// LONGEST tokens, TIMES or more times in a row and TOKENS tokens long, or PLAIN_TOKENS long if it has fewer than WORDS words.
const LONGEST = 96;
const TIMES = 4;
const [TOKENS, PLAIN_TOKENS] = [192, 384];
const WORDS = 3;
const WORD = /\p{L}{2,}|[\u3040-\u30ff\u3400-\u9fff]/gu;

export class LoopGuard {
  // decode: token ids -> text
  constructor(decode) {
    this.decode = decode;
    this.recent = new Array(LONGEST).fill(-1); // the last tokens, the newest first
    this.equal = new Array(LONGEST).fill(0); // [p - 1]: how many of the last tokens equal those p before them
  }

  // Add a token; whether the text loops
  push(token) {
    this.equal = this.equal.map((count, index) => (this.recent[index] === token ? count + 1 : 0));
    const found = this.equal.findIndex((count, index) => count + index + 1 >= Math.max(TOKENS, TIMES * (index + 1)));
    this.recent = [token, ...this.recent.slice(0, -1)];
    if (found < 0) return false;
    const period = found + 1;
    const words = this.decode(this.recent.slice(0, period).reverse()).match(WORD) ?? [];
    return new Set(words.map((word) => word.toLowerCase())).size >= WORDS || this.equal[found] + period >= PLAIN_TOKENS;
  }
}
