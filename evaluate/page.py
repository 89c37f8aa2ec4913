"""The report's style sheet. System fonts only; one column on a narrow screen; tables scroll on their own."""

CSS = """
:root{--ink:#1b1f24;--muted:#57606a;--rule:#d8dee4;--soft:#f6f8fa;--accent:#0b5cad}
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:3.6rem;-webkit-text-size-adjust:100%}
body{margin:0;color:var(--ink);background:#fff;font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"Liberation Sans",sans-serif;font-variant-numeric:tabular-nums}
.wrap{max-width:70rem;margin:0 auto;padding:0 clamp(1rem,4vw,2.5rem)}
.skip{position:absolute;left:-999rem}.skip:focus{left:1rem;top:.5rem;background:#fff;padding:.5rem;z-index:9}
header{padding:clamp(2rem,6vw,4rem) 0 1.6rem}
.kicker{margin:0;color:var(--accent);font-weight:600;font-size:.85rem;letter-spacing:.04em}
h1{font-size:clamp(1.7rem,4.4vw,2.6rem);line-height:1.15;letter-spacing:-.02em;margin:.3rem 0 .6rem;text-wrap:balance}
h2{font-size:1.5rem;line-height:1.25;letter-spacing:-.01em;margin:0 0 1rem}
h3{font-size:1.1rem;margin:2rem 0 .7rem}
.sub{margin:0;color:var(--muted);font-size:1.05rem;overflow-wrap:anywhere}
nav{position:sticky;top:0;background:rgba(255,255,255,.96);border-block:1px solid var(--rule);z-index:5}
nav ul{display:flex;gap:1.4rem;list-style:none;margin:0;padding:0;overflow-x:auto;scrollbar-width:none}
nav ul::-webkit-scrollbar{display:none}
nav a{display:block;padding:.7rem 0;color:var(--muted);text-decoration:none;white-space:nowrap;font-size:.9rem}
a{color:var(--accent)}
nav a:hover,nav a:focus-visible{color:var(--ink);text-decoration:underline;text-underline-offset:.35em}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
section{padding:2.4rem 0 1.2rem;border-bottom:1px solid var(--rule)}
section:last-child{border-bottom:0}
.lead{max-width:46rem;margin:0 0 1.2rem}
.note{max-width:46rem;color:var(--muted);font-size:.88rem;margin:1rem 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(19rem,100%),1fr));gap:1rem;list-style:none;margin:0;
padding:0}
.cards li{background:var(--soft);border:1px solid var(--rule);border-radius:.6rem;padding:1.1rem 1.2rem}
.cards strong{display:block;font-size:1.45rem;white-space:nowrap;line-height:1.2;letter-spacing:-.01em}
.cards p{margin:.45rem 0 0;font-size:.92rem;color:var(--muted)}.cards b{color:var(--ink)}
.scroll{overflow-x:auto;margin:1.2rem 0;border:1px solid var(--rule);border-radius:.6rem}
table{border-collapse:collapse;width:100%;font-size:.9rem}
caption{text-align:left;font-weight:600;padding:.75rem .7rem;font-size:.95rem}
th,td{padding:.45rem .7rem;text-align:right;white-space:nowrap;vertical-align:baseline}
th.t,td.t{text-align:left}
thead th{color:var(--muted);font-weight:600;font-size:.82rem;background:var(--soft);border-block:1px solid var(--rule)}
tbody tr+tr td{border-top:1px solid #eceff2}
tbody tr.group+tr:not(.group) td{border-top-color:transparent}
.ci{display:block;color:var(--muted);font-size:.86em;line-height:1.3}
.place{display:block;white-space:normal;min-width:8.5rem;font-size:.92em}
.quiet{color:var(--muted)}
.model{white-space:nowrap}.model i{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em}
.figures{display:grid;margin:1.2rem 0;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));
gap:1.2rem 1.6rem}
.figures figure{margin:0;min-width:0}
.figures svg{display:block;width:100%;max-width:34rem;height:auto}
details{margin:.8rem 0}summary{cursor:pointer;color:var(--accent);font-size:.93rem;padding:.25rem 0}
.samples{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:1.2rem}
.sample{margin:0;border:1px solid var(--rule);border-radius:.6rem;overflow:hidden}
.sample figcaption{padding:.6rem .9rem;background:var(--soft);border-bottom:1px solid var(--rule);font-size:.9rem}
.sample .quiet{margin-left:.6rem;font-size:.85em}
pre,code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;font-size:.86em}
pre{margin:0;padding:.9rem;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5}
.commands{background:var(--soft);border:1px solid var(--rule);border-radius:.6rem}
.versions{display:flex;flex-wrap:wrap;gap:.5rem 2rem;margin:0}
.versions dt{color:var(--muted);font-size:.82rem}.versions dd{margin:0;overflow-wrap:anywhere}
.ok{color:#116329;font-weight:600;white-space:nowrap}.bad{color:#a40e26;font-weight:600;white-space:nowrap}
.break{white-space:normal;overflow-wrap:anywhere;display:block;min-width:14rem;max-width:40rem}
.bar{display:inline-block;width:6rem;height:.6rem;margin-right:.7rem;border-radius:.3rem;
background:linear-gradient(#0072B2,#0072B2) 0/var(--share) 100% no-repeat,var(--rule)}
footer{color:var(--muted);font-size:.85rem;padding:1.5rem 0 3rem}
@media (max-width:40rem){body{font-size:15px}th,td{padding:.4rem .65rem}.cards strong{font-size:1.3rem}}
@media print{nav,.skip{display:none}section{break-inside:auto}figure,tr{break-inside:avoid}}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
"""
