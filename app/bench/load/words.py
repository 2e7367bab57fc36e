"""Words that prompts are made of: common, short, and one or two tokens each to most tokenizers."""

_TEXT = """
able about above across add after again against age air all almost alone along also always among animal
answer any appear area arm around ask away baby back ball bank base bear beat beauty bed been before began
begin behind believe bell best better between big bird black block blood blow blue board boat body bone
book born both bottom box boy branch bread break bright bring broad brother brown build burn busy buy call
came can capital captain car card care carry case cat catch cause cell center certain chair chance change
chart check chief child choose circle city claim class clean clear climb clock close cloth cloud coast
coat cold color column come common compare complete contain control cook cool copy corn corner cost cotton
could count country course cover create crop cross crowd cry current cut dance danger dark day dead deal
dear death decide deep desert design develop differ dinner direct discuss doctor dog dollar door double
down draw dream dress drink drive drop dry during each ear early earth ease east edge effect egg eight
electric element end enemy energy engine enough enter equal even evening event ever every exact example
except excite exercise expect eye face fact fair fall family famous far farm fast father favor fear feed
feel feet few field fight figure fill final find fine finger finish fire first fish fit five flat floor
flow flower fly follow food foot force forest form forward found four free fresh friend front fruit full
fun game garden gas gather general gentle girl glad glass gold good govern grand grass gray great green
ground group grow guess guide gun hair half hand happen happy hard hat head hear heart heat heavy help
"""

WORDS = tuple(_TEXT.split())
